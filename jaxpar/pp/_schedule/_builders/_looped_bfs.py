"""Looped breadth-first: GPipe over several stages per rank, a whole stage at a time.

    rank 0 | 0F0 0F1 2F0 2F1  .   .  2B1 2B0 0B1 0B0        bubble (p-1)(F+B), peak v m
    rank 1 |  .  1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0

A rank needs one stage's parameters at a time, which suits FSDP: each is gathered twice in a step. Source: Lamy-Poirier
2022, arXiv 2211.05953; PyTorch's ScheduleLoopedBFS.
"""

from collections.abc import Iterator

from jaxpar.pp._schedule._action import Action
from jaxpar.pp._schedule._builders._builder import Builder, Shape, backwards, forwards


def row(shape: Shape, rank: int) -> Iterator[Action]:
    """Stage by stage all F; then, last stage and last microbatch first, all B."""
    stages = range(rank, shape.n_stages, shape.n_ranks)
    for stage in stages:
        yield from forwards(stage, range(shape.n_microbatches))
    for stage in reversed(stages):
        yield from backwards(stage, reversed(range(shape.n_microbatches)))


BUILDER = Builder("LoopedBFS", row, usual_stages_per_rank=2)
