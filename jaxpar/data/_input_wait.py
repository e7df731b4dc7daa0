"""How long a loop waits for its input: the time in next(), and its share of all time.

    |--wait--|---- step ----|-wait-|---- step ----|          share = (wait + wait) / all

Measured on the host: while steps are in flight on the devices, a short wait may cost nothing.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class InputWait:
    """Adds up waits until somebody asks."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._num_waits = 0
        self._since: float | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the call that may have to wait."""
        begin = time.perf_counter()
        if self._since is None:
            self._since = begin
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - begin
            self._num_waits += 1

    def metrics(self) -> dict[str, float]:
        """Of the time since the first wait, or since the last call."""
        now = time.perf_counter()
        total_s = now - self._since if self._since is not None else 0.0
        waited_s, num_waits = self._waited_s, self._num_waits
        self._waited_s, self._num_waits, self._since = 0.0, 0, now
        return {
            "input_wait_s": waited_s / max(num_waits, 1),
            "input_wait_share": waited_s / total_s if num_waits else 0.0,
        }
