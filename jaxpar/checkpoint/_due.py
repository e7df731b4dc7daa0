"""When to save: every n steps, every n minutes, and once more when the job is told to end; all processes at the same step.

    SIGTERM at process 1 in step 117   ->   all processes: `is_ending` from step 119 on, the first that none has passed

JAX's coordination service agrees on that step (`reached_preemption_sync_point`). A process alone notes the signal itself.
"""

import signal
import threading
import time
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxpar.mesh import broadcast_object, get_rank

# With several processes the clock of rank 0 decides, and telling the others costs a message: not in every step.
STEPS_BETWEEN_QUESTIONS = 10


class Due:
    """Decides for each step; called once for every step, by all processes.

    Args:
        every_steps: save after steps that this divides; None: by the clock alone.
        every_minutes: save when so much time has passed since the last save.
    """

    def __init__(self, *, every_steps: int | None, every_minutes: float | None) -> None:
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self._saved_at_s = time.monotonic()
        self.is_ending = False
        self._signal = _Signal() if jax.process_count() == 1 else None

    def __call__(self, step: int) -> bool:
        """Whether to save after this step."""
        self.is_ending = self.is_ending or self._is_told_to_end(step)
        if self.is_ending:
            return True
        if self._every_steps is not None and step % self._every_steps == 0:
            return True
        return self._is_time(step)

    def saved(self) -> None:
        """A save has begun: minutes count from now."""
        self._saved_at_s = time.monotonic()

    def close(self) -> None:
        """Gives SIGTERM back to whoever had it."""
        if self._signal is not None:
            self._signal.close()

    def _is_told_to_end(self, step: int) -> bool:
        if self._signal is not None:
            return self._signal.has_come
        try:
            return multihost_utils.reached_preemption_sync_point(step)
        except (
            RuntimeError
        ):  # the service is switched off (jax_enable_preemption_service): SIGTERM ends processes at once
            return False

    def _is_time(self, step: int) -> bool:
        if self._every_minutes is None:
            return False
        if jax.process_count() == 1:
            return self._minutes_passed()
        if step % STEPS_BETWEEN_QUESTIONS:
            return False
        return broadcast_object(self._minutes_passed() if get_rank() == 0 else None)

    def _minutes_passed(self) -> bool:
        assert self._every_minutes is not None
        return time.monotonic() - self._saved_at_s >= 60 * self._every_minutes


class _Signal:
    """Notes SIGTERM instead of ending; only Python's main thread may ask for it."""

    def __init__(self) -> None:
        self.has_come = False
        self._is_ours = threading.current_thread() is threading.main_thread()
        self._before: Any = signal.signal(signal.SIGTERM, self._note) if self._is_ours else None

    def close(self) -> None:
        if self._is_ours and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
