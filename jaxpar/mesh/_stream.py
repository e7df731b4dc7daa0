"""Pieces of arrays on their way to the host: as many at once as a budget allows, in order.

started   [a0] [a1] [b0] ...   ->   finished   a0, a1: a is whole, yield it; b0, ...

While one piece is copied the next ones are gathered.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

# More collective programs in flight than this only cost memory (and can deadlock XLA:CPU's small thread pool).
MAX_PIECES_IN_FLIGHT = 8


@dataclass(frozen=True)
class Piece:
    """A part of an array that travels at once.

    Args:
        num_bytes: what it takes while it travels.
        start: begins the work and returns what to wait for.
        finish: waits for that, and puts it where it belongs on the host.
    """

    num_bytes: int
    start: Callable[[], Any]
    finish: Callable[[Any], None]


@dataclass(frozen=True)
class Reading:
    """An array that is being read.

    Args:
        pieces: what has to travel, in order.
        result: the array on the host, once all pieces are finished; None on a process that does not keep it.
    """

    pieces: Iterable[Piece]
    result: Callable[[], np.ndarray | None]


def read_all(readings: Iterable[Reading], budget_bytes: int) -> Iterator[np.ndarray | None]:
    """Yields the arrays in order; what travels at any time stays within the budget, or is one piece."""
    waiting: collections.deque[tuple[Piece, Any]] = collections.deque()
    done: collections.deque[tuple[Reading, int]] = (
        collections.deque()
    )  # with the number of pieces before its end
    num_bytes = num_started = num_finished = 0

    def finish_one() -> None:
        nonlocal num_bytes, num_finished
        piece, started = waiting.popleft()
        piece.finish(started)
        num_bytes, num_finished = num_bytes - piece.num_bytes, num_finished + 1

    def finished() -> Iterator[np.ndarray | None]:
        while done and done[0][1] <= num_finished:
            yield done.popleft()[0].result()

    for reading in readings:
        for piece in reading.pieces:
            while waiting and (
                num_bytes + piece.num_bytes > budget_bytes or len(waiting) == MAX_PIECES_IN_FLIGHT
            ):
                finish_one()
            waiting.append((piece, piece.start()))
            num_bytes, num_started = num_bytes + piece.num_bytes, num_started + 1
        done.append((reading, num_started))
        yield from finished()
    while waiting:
        finish_one()
        yield from finished()
