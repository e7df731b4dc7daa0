"""The keys of a job store and who waits for them: no sockets, no threads, no clock of its own.

wait {a, b} until t=9        set a          set b
|-- missing {a, b} ----------- {b} ---------- {} -> done([])
                                '-- t=9: expire(now) -> done(["b"])
"""

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Waiter:
    """One wait: the keys not yet there, its deadline, and whom to tell (the keys still missing, in order)."""

    keys: tuple[str, ...]
    missing: set[str]
    deadline: float
    done: Callable[[list[str]], None]


class StoreTable:
    """Keys to wire values. Every method is one atomic step, because one thread calls them all."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._waiters: dict[str, set[Waiter]] = {}
        self._pending: set[Waiter] = set()
        self._deadlines: list[tuple[float, int, Waiter]] = []  # a heap; waits that ended stay until popped
        self._order = itertools.count()

    def get(self, key: str) -> Any:
        """The wire value, or None."""
        return self._values.get(key)

    def set(self, key: str, value: Any) -> None:
        """Sets the key and tells the waits that it completes."""
        self._values[key] = value
        for waiter in self._waiters.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                self._pending.discard(waiter)
                waiter.done([])

    def compare_set(self, key: str, expected: Any, value: Any) -> Any:
        """Sets the key if it holds `expected` (None: is absent). Returns what it holds afterwards."""
        if self._values.get(key) == expected:
            self.set(key, value)
        return self._values.get(key)

    def keys(self, prefix: str) -> list[str]:
        """The keys that start with `prefix`, sorted."""
        return sorted(key for key in self._values if key.startswith(prefix))

    def delete(self, keys: Iterable[str]) -> int:
        """Removes the keys. Returns how many there were."""
        return sum(self._values.pop(key, None) is not None for key in keys)

    def wait(self, waiter: Waiter) -> None:
        """Tells `waiter` at once if nothing is missing, otherwise keeps it."""
        waiter.missing = {key for key in waiter.keys if key not in self._values}
        if not waiter.missing:
            waiter.done([])
            return
        self._pending.add(waiter)
        heapq.heappush(self._deadlines, (waiter.deadline, next(self._order), waiter))
        for key in waiter.missing:
            self._waiters.setdefault(key, set()).add(waiter)

    def forget(self, waiter: Waiter) -> None:
        """Drops a wait without telling it: its client is gone."""
        self._pending.discard(waiter)
        for key in waiter.missing:
            waiters = self._waiters.get(key, set())
            waiters.discard(waiter)
            if not waiters:
                self._waiters.pop(key, None)

    def expire(self, now: float) -> None:
        """Tells every wait whose deadline has passed which keys it still misses."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            waiter = heapq.heappop(self._deadlines)[2]
            self.forget(waiter)
            waiter.done([key for key in waiter.keys if key in waiter.missing])

    def next_deadline(self) -> float | None:
        """When `expire` has something to do; None if nobody waits."""
        while self._deadlines and self._deadlines[0][2] not in self._pending:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None
