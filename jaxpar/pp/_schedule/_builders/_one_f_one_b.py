"""1F1B and eager 1F1B: after a warm-up every forward waits for a backward, so few activations are held.

    rank 0 | 0F0 0F1  .  0B0 0F2 0B1  .  0B2        bubble (p-1)(F+B), peak min(m, p-r) on rank r
    rank 1 |  .  1F0 1B0 1F1 1B1 1F2 1B2

The eager one warms up with min(m, 2(p-r)-1) forwards: a rank has work while activations and gradients travel.
Fewer microbatches than ranks cut the warm-up short. Sources: Narayanan et al. 2019, arXiv 1806.03377 (1F1B),
Zhuang et al. 2022, arXiv 2211.05322 (eager); PyTorch's Schedule1F1B, in the order its runtime runs it.
"""

from collections.abc import Iterator

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._builders._builder import Builder, Shape, backwards, forwards


def row(shape: Shape, rank: int) -> Iterator[Action]:
    """p - r forwards, then one backward and one forward in turn, then what is left."""
    return _warm_then_alternate(shape, rank, warm_up=shape.n_ranks - rank)


def eager_row(shape: Shape, rank: int) -> Iterator[Action]:
    """The same with 2(p - r) - 1 forwards first."""
    return _warm_then_alternate(shape, rank, warm_up=2 * (shape.n_ranks - rank) - 1)


def _warm_then_alternate(shape: Shape, stage: int, *, warm_up: int) -> Iterator[Action]:
    total = shape.n_microbatches
    warm_up = min(total, warm_up)
    yield from forwards(stage, range(warm_up))
    for microbatch in range(total - warm_up):
        yield Action(stage, Op.B, microbatch)
        yield Action(stage, Op.F, microbatch + warm_up)
    yield from backwards(stage, range(total - warm_up, total))


BUILDER = Builder("1F1B", row, stages_per_rank=1)
EAGER_BUILDER = Builder("Eager1F1B", eager_row, stages_per_rank=1)
