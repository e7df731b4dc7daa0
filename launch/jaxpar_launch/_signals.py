"""Signals to the launcher, turned into something that its one loop can wait for.

    SIGTERM SIGINT SIGHUP SIGQUIT   end the job: passed on to the workers, SIGKILL after the grace period
    SIGUSR1 SIGUSR2                 passed on to the workers (batch systems announce the end of an allocation so)

Only the main thread can take signals; elsewhere (a launch from a thread) this is an inbox that stays empty.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


class SignalInbox:
    """A context in which signals are collected; `fd` becomes readable when one has come.

    Args:
        heard: told of each that is taken.
    """

    def __init__(self, heard: Callable[[int], None] = lambda signum: None) -> None:
        self._heard = heard
        self.looked_at = time.monotonic()  # every loop of the launcher looks on each turn
        self._pending: list[int] = []
        self._previous: dict[int, Any] = {}
        self._previous_wakeup = -1
        self.fd, self._write_fd = os.pipe()
        for end in (self.fd, self._write_fd):
            os.set_blocking(end, False)

    def __enter__(self) -> "SignalInbox":
        if threading.current_thread() is threading.main_thread():
            self._previous_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
            for signum in ENDING + FORWARDED:
                if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup stays nohup
                    self._previous[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._previous:
            signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self.fd)
        os.close(self._write_fd)

    def _receive(self, signum: int, _frame: object) -> None:
        self._pending.append(signum)

    def take(self) -> list[int]:
        """The signals that came since the last call, in order."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            pass
        self.looked_at = time.monotonic()
        pending, self._pending = self._pending, []
        for signum in pending:
            self._heard(signum)
        return pending
