"""The depth-first order of interleaved schedules: groups of microbatches go through a rank's stages in turn.

p = 2, m = 4, v = 2, rank 0      0F0 0F1 2F0 2F1 | 0F2 0F3 2F2 2F3
                                  \\ a group of 2 /    the next group
"""

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._builders._builder import Shape

RULE = "n_microbatches is a multiple of max(1, n_microbatches // n_ranks), so that it falls into equal groups"


def is_defined(shape: Shape) -> bool:
    """Whether microbatches fall into equal groups of at least n_ranks (or all are one group)."""
    return shape.n_microbatches % num_groups(shape) == 0


def num_groups(shape: Shape) -> int:
    """Groups of microbatches that go through all stages of a rank before the next."""
    return max(1, shape.n_microbatches // shape.n_ranks)


def group_size(shape: Shape) -> int:
    """Microbatches in a group."""
    return shape.n_microbatches // num_groups(shape)


def forward(shape: Shape, rank: int, count: int) -> Action:
    """The `count`-th forward of a rank."""
    turn, microbatch = _turn(shape, count)
    return Action(rank + turn * shape.n_ranks, Op.F, microbatch)


def backward(shape: Shape, rank: int, count: int, op: Op = Op.B) -> Action:
    """The `count`-th backward (or half of one) of a rank: the same groups, the last stage first."""
    turn, microbatch = _turn(shape, count)
    return Action(rank + (shape.stages_per_rank - 1 - turn) * shape.n_ranks, op, microbatch)


def _turn(shape: Shape, count: int) -> tuple[int, int]:
    """Which of a rank's stages, counted in the direction of flow, and which microbatch."""
    size = group_size(shape)
    group, within = divmod(count, size * shape.stages_per_rank)
    turn, offset = divmod(within, size)
    return turn, group * size + offset
