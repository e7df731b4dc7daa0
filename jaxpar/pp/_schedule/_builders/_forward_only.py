"""Forward only, for evaluation: microbatches flow through, nothing is kept.

    rank 0 | 0F0 0F1 2F0 2F1           bubble (p-1) F, one activation held
    rank 1 |  .  1F0 1F1 3F0 3F1

Source: PyTorch's _ScheduleForwardOnly and schedule.eval.
"""

from collections.abc import Iterator

from jaxpar.pp._schedule._action import Action
from jaxpar.pp._schedule._builders._builder import Builder, Shape, forwards


def row(shape: Shape, rank: int) -> Iterator[Action]:
    """Stage by stage all F: p or more microbatches keep every rank busy."""
    for stage in range(rank, shape.n_stages, shape.n_ranks):
        yield from forwards(stage, range(shape.n_microbatches))


BUILDER = Builder("ForwardOnly", row)
