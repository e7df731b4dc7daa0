"""Nobody outlives the launcher, not even when it is killed by SIGKILL: a shell holds the other end of a pipe.

    launcher --pipe--> /bin/sh    reads "-101 -102", the process groups that run now; a new line replaces the old
                                  pipe closes = the launcher is gone  ->  kill -s KILL -- -101 -102

A parent-death signal would reach only the workers, not their children, and exists only on Linux.
"""

import contextlib
import signal
import subprocess
from collections.abc import Iterable

_SCRIPT = 'while read -r line; do groups=$line; done; [ -z "$groups" ] || kill -s KILL -- $groups'


class Reaper:
    """The guard of one launch. `watch` tells it whom to end; `close` sends it away."""

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def watch(self, pids: Iterable[int]) -> None:
        """Replaces the list of process groups that end with the launcher."""
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # someone killed the guard; the job need not suffer
            self._shell.stdin.write(" ".join(f"-{pid}" for pid in pids).encode() + b"\n")
            self._shell.stdin.flush()

    def close(self) -> None:
        """Ends the guard without harm to anyone."""
        self._shell.send_signal(signal.SIGKILL)
        self._shell.wait()
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.close()
