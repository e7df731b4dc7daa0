"""The word that a worker was lost: a thread waits for it, and frees whoever waits for the lost one.

launcher   recovery/<n>/word = new coordinator, pids of the survivors
thread     hears it --> the group is broken --> cuts collectives, interrupts meetings, until this world is left
main       its collective or meeting fails, or it comes to a safe point --> `Word.await_s`
"""

import contextlib
import threading
from dataclasses import dataclass
from typing import Self

from jaxpar.mesh._cut import cut
from jaxpar.mesh._group import ProcessGroup
from jaxpar_launch.store import StoreClient, StoreError, StoreTimeoutError

_LISTEN_S = 60.0
_AGAIN_S = 0.2


@dataclass(frozen=True)
class News:
    """Where the next world meets, and the processes that were left of this one."""

    coordinator: str
    pids: tuple[int, ...]


class Word:
    """Listens as long as it is entered.

    Args:
        group: this world.
        number: of the next one.
    """

    def __init__(self, group: ProcessGroup, number: int) -> None:
        self._group = group
        self._key = f"recovery/{number}/word"
        self._store = group.store.clone()
        self._news: News | None = None
        self._heard, self._left = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxpar-word", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._store.interrupt()
        self._thread.join()
        self._store.close()

    def await_s(self, timeout_s: float) -> News | None:
        """The word, if it comes in time."""
        self._heard.wait(timeout_s)
        return self._news

    def _run(self) -> None:
        with contextlib.suppress(StoreError):
            self._news = self._listen(self._store)
        if self._news is not None:
            self._heard.set()
            # More than once: main may pass its last safe point just before, and enter a collective just after.
            while not self._left.is_set():
                self._group.break_up()
                cut(self._news.pids)
                self._left.wait(_AGAIN_S)

    def _listen(self, store: StoreClient) -> News | None:
        while not self._left.is_set():
            with contextlib.suppress(StoreTimeoutError):
                said = store.get(self._key, timeout_s=_LISTEN_S)
                return News(said["coordinator"], tuple(said["pids"]))
        return None
