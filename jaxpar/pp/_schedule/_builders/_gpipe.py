"""GPipe: all forwards, then all backwards; every activation is held at once.

    rank 0 | 0F0 0F1  .   .  0B0 0B1           bubble (p-1)(F+B), peak m
    rank 1 |  .  1F0 1F1 1B0 1B1

Source: Huang et al. 2018, arXiv 1811.06965; PyTorch's ScheduleGPipe.
"""

from collections.abc import Iterator

from jaxpar.pp._schedule._action import Action
from jaxpar.pp._schedule._builders._builder import Builder, Shape, backwards, forwards


def row(shape: Shape, rank: int) -> Iterator[Action]:
    """All F, then all B, both in microbatch order."""
    yield from forwards(rank, range(shape.n_microbatches))
    yield from backwards(rank, range(shape.n_microbatches))


BUILDER = Builder("GPipe", row, stages_per_rank=1)
