"""One worker: a process in a session of its own, its output, and how it ended.

    Worker.start -> look (has it ended? then its whole process group ends too) -> exit_code, tail
                    send (a signal to the process)       kill (SIGKILL to its process group)

Where its output goes, for each of stdout and stderr:

| case                                                          | the worker writes to       |
|---------------------------------------------------------------|----------------------------|
| `--redirects` names it                                        | its log file               |
| local rank 0, launcher on a terminal, no `--tee`  | the terminal: bars work    |
| otherwise                                                     | a pipe to the launcher     |
"""

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar_launch._logs import (
    NUM_TAIL_LINES,
    ConsoleSink,
    FileSink,
    MemorySink,
    Sink,
    Stream,
    TailSink,
    last_lines,
)
from jaxpar_launch._run import STACKS_FILE, VALUE_FILE
from jaxpar_launch._spec import LaunchSpec
from jaxpar_launch.env import WorkerEnv

_FDS = {"stdout": 1, "stderr": 2}
_STUCK_S = 5.0


@dataclass(frozen=True)
class Console:
    """Where workers' output is shown: the launcher's own streams, or a memory per rank, or both.

    `memories` has one entry per local rank when output is captured (`jaxpar_launch.launch`).
    """

    hostname: str
    is_shown: bool = True
    memories: tuple[MemorySink, ...] = ()


class Worker:
    """A running or ended worker."""

    def __init__(
        self,
        env: WorkerEnv,
        process: subprocess.Popen[bytes],
        streams: list[Stream],
        tail: deque[str],
        folder: str,
    ) -> None:
        self.env, self.streams, self.folder = env, streams, folder
        self.ended_at: float | None = None
        self.exit_code: int | None = None
        self.exit_fd = _open_pidfd(process.pid)
        self._process, self._tail = process, tail

    @classmethod
    def start(
        cls, spec: LaunchSpec, env: WorkerEnv, *, environ: Mapping[str, str], folder: str, console: Console
    ) -> "Worker":
        """Starts the process; raises OSError if the program cannot be run."""
        tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        stdout, stderr = (_output(spec, env, name, folder, console, tail) for name in _FDS)
        streams = [output.stream for output in (stdout, stderr) if output.stream is not None]
        try:
            process = subprocess.Popen(
                spec.argv(os.path.join(folder, "error.json"), local_rank=env.local_rank),
                env=dict(environ),
                stdin=None if spec.nproc == 1 and console.is_shown else subprocess.DEVNULL,
                stdout=stdout.target,
                stderr=stderr.target,
                start_new_session=True,
            )
        except OSError:
            for stream in streams:
                stream.close()
            raise
        finally:
            stdout.close_target()
            stderr.close_target()
        return cls(env, process, streams, tail, folder)

    @property
    def pid(self) -> int:
        """The process id, also the id of its process group and session."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process had not ended at the last look."""
        return self.exit_code is None

    def look(self) -> bool:
        """Looks whether the process has ended just now; then its process group ends and its pid is given back."""
        if not self.is_running or not self._has_ended():
            return False
        self.ended_at = time.time()
        self.kill()  # what it left behind, before its pid, the group's id, can belong to someone else
        self.exit_code = self._process.wait()
        return True

    def _has_ended(self) -> bool:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._process.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def send(self, signum: int) -> None:
        """Sends a signal to the process, not to its children: they are its own business while it lives."""
        if self.is_running:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Sends SIGKILL to the whole process group."""
        if self.is_running:
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # macOS: EPERM for a zombie's group
                os.killpg(self.pid, signal.SIGKILL)

    def tail(self) -> list[str]:
        """The last lines of its output, as far as they passed the launcher or lie in its log files."""
        lines = list(self._tail)
        for name in _FDS:
            path = os.path.join(self.folder, f"{name}.log")
            if not lines and os.path.exists(path):
                lines = last_lines(path)
        return lines

    def take_value(self) -> bytes:
        """What its function returned, pickled; empty if it returned nothing. No file is left: logs are for reading."""
        path = os.path.join(self.folder, VALUE_FILE)
        try:
            with open(path, "rb") as file:
                value = file.read()
            os.unlink(path)
        except FileNotFoundError:
            return b""
        return value

    def close(self) -> None:
        """Ends what still runs and closes what is open."""
        self.kill()
        if self.is_running:
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # stuck in the kernel: nothing more can be done
                self.exit_code = self._process.wait(timeout=_STUCK_S)
        for stream in self.streams:
            stream.close()
        with contextlib.suppress(OSError):
            stacks = os.path.join(self.folder, STACKS_FILE)
            if os.path.getsize(stacks) == 0:  # nobody asked where it hangs
                os.unlink(stacks)
        if self.exit_fd is not None:
            os.close(self.exit_fd)
            self.exit_fd = None


@dataclass(frozen=True)
class _Output:
    """One stream of a worker before it starts: what the process gets, what the launcher keeps."""

    target: int | None
    stream: Stream | None = None

    def close_target(self) -> None:
        if self.target is not None:
            os.close(self.target)


def _output(
    spec: LaunchSpec, env: WorkerEnv, name: str, folder: str, console: Console, tail: deque[str]
) -> _Output:
    """Decides by the table in this module's docstring."""
    log = os.path.join(folder, f"{name}.log")
    if spec.redirects.has(env.local_rank, name):
        return _Output(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    is_tee = spec.tee.has(env.local_rank, name)
    is_shown = console.is_shown and (
        spec.local_ranks_filter is None or env.local_rank in spec.local_ranks_filter
    )
    if env.local_rank == 0 and is_shown and not is_tee and not console.memories and os.isatty(_FDS[name]):
        return _Output(None)
    sinks: list[Sink] = [TailSink(tail)]
    if is_tee:
        sinks.append(FileSink(log))
    if is_shown:
        prefix = spec.prefix(rank=env.rank, local_rank=env.local_rank, hostname=console.hostname)
        sinks.append(ConsoleSink(_FDS[name], prefix if env.world_size > 1 else ""))
    if console.memories:
        sinks.append(console.memories[env.local_rank])
    read_fd, write_fd = os.pipe()
    return _Output(write_fd, Stream(read_fd, sinks))


def _open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends, where the system has such (Linux)."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
