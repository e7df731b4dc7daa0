"""Arithmetic of uneven splits: who holds which rows, and where the padding lies.

A dim of n is split over axes one after the other, outermost first, each time as `torch.chunk` does: pieces of
ceil(n / ranks), the last ones shorter or empty. Every device holds the same number of rows in memory, so shorter
pieces are padded at their end. Five rows over tp=2, then over dp=2 (`.` is padding):

                tp=0                tp=1
    over tp     0 1 2               3 4 .
    over dp     0 1 | 2 .           3 . | 4 .         memory: 0 1 2 . 3 . 4 .
"""

from functools import lru_cache
from math import ceil, prod

import numpy as np

PAD = -1


def padded_length(size: int, parts: tuple[int, ...]) -> int:
    """Rows of a dim that one device holds in memory after splits over `parts`, outermost first."""
    for part in parts:
        size = ceil(size / part)
    return size


def is_even(size: int, parts: tuple[int, ...]) -> bool:
    """Whether the splits need no padding."""
    return size % prod(parts) == 0


@lru_cache(maxsize=1024)
def piece_lengths(size: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    """Number of rows that each piece really has, row-major over `parts`."""
    lengths = [size]
    for part in parts:
        lengths = [
            max(0, min(ceil(length / part), length - rank * ceil(length / part)))
            for length in lengths
            for rank in range(part)
        ]
    return tuple(lengths)


@lru_cache(maxsize=1024)
def row_table(size: int, parts: tuple[int, ...]) -> np.ndarray:
    """Which row of the dim lies where: int[pieces, rows in memory], `PAD` where there is none."""
    lengths = np.asarray(piece_lengths(size, parts))
    starts = np.cumsum(lengths) - lengths
    slots = np.arange(padded_length(size, parts))
    table = np.where(slots < lengths[:, None], starts[:, None] + slots, PAD)
    table.setflags(write=False)
    return table


def memory_rows(size: int, parts: tuple[int, ...]) -> np.ndarray:
    """For each place in memory its row, one past the end for padding."""
    table = row_table(size, parts).ravel()
    return np.where(table == PAD, size, table).astype(np.int32)


def row_places(size: int, parts: tuple[int, ...]) -> np.ndarray:
    """For each row its place in memory."""
    return np.flatnonzero(row_table(size, parts).ravel() != PAD).astype(np.int32)


@lru_cache(maxsize=1024)
def deal_table(size: int, outer: tuple[int, ...], inner: tuple[int, ...]) -> np.ndarray:
    """For each outer piece: where in its memory the row lies that goes to each place of its inner pieces, in order.

    Returns:
        int[outer pieces, inner pieces * rows], places of padding pointing one past the end.
    """
    whole = row_table(size, outer)
    pieces = row_table(size, (*outer, *inner)).reshape(whole.shape[0], -1)
    return _positions(whole, pieces)


@lru_cache(maxsize=1024)
def join_table(size: int, outer: tuple[int, ...], inner: tuple[int, ...]) -> np.ndarray:
    """The inverse of `deal_table`: int[outer pieces, rows], pointing into the inner pieces side by side."""
    whole = row_table(size, outer)
    pieces = row_table(size, (*outer, *inner)).reshape(whole.shape[0], -1)
    return _positions(pieces, whole)


def _positions(held: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """For each row of both tables: index in `held` of each entry of `wanted`, one past the end for padding."""
    nowhere = held.shape[1]
    found = np.full(wanted.shape, nowhere, dtype=np.int32)
    for piece in range(held.shape[0]):
        index_of: dict[int, int] = {int(row): index for index, row in enumerate(held[piece]) if row != PAD}
        found[piece] = np.asarray([index_of.get(int(row), nowhere) for row in wanted[piece]], dtype=np.int32)
    return found
