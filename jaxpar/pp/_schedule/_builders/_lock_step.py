"""1F1B for a tick loop: in the steady state every rank does one forward and one backward in each tick, as one pair.

    rank 0 | 0F0 0F1    0F2    (0F3;0B0)    0B1       0B2    0B3
    rank 1 |  .  1F0 (1F1;1B0) (1F2;1B1) (1F3;1B2)    1B3     .

A tick lasts as long as its slowest rank: 1F1B's ticks, F on one rank beside B on the next, cost 2B a microbatch, a pair F + B.
In lock-step (m + p - 1)(F + B), which is 1F1B's time where ranks do not wait for each other; peak min(m, 2(p-r)) on rank r. A
pair runs together, so its backward is of an earlier microbatch than its forward: one activation more than if the last rank
could turn around within a tick. Source: the warm-up is eager 1F1B's (Zhuang et al. 2022, arXiv 2211.05322).
"""

from collections.abc import Iterator

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._builders._builder import Builder, Shape, backwards, forwards


def row(shape: Shape, rank: int) -> Iterator[Action]:
    """2(p - r) - 1 forwards, then pairs, then what is left."""
    total = shape.n_microbatches
    warm_up = min(total, 2 * (shape.n_ranks - rank) - 1)
    yield from forwards(rank, range(warm_up))
    for microbatch in range(total - warm_up):
        yield Action.overlap(Action(rank, Op.F, microbatch + warm_up), Action(rank, Op.B, microbatch))
    yield from backwards(rank, range(total - warm_up, total))


BUILDER = Builder("LockStep1F1B", row, stages_per_rank=1)
