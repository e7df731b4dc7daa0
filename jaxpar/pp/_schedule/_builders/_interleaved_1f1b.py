"""Interleaved 1F1B: several stages per rank, one forward and one backward in turn; the bubble shrinks v-fold.

    rank 0 | 0F0 0F1 2F0 2F1  .   .  0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3  .  0B2  .  0B3
    rank 1 |  .  1F0 1F1  .  3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3  .  1B2  .  1B3

Bubble (F+B)[(p-1) + (v-1) max(0, p-m)] in times of one stage, 1/v of a rank's layers; peak
min(v m, (v-1) g + 2(p-1-r) + 1) with groups of g microbatches. Source: Narayanan et al. 2021, arXiv 2104.04473;
PyTorch's ScheduleInterleaved1F1B.
"""

from collections.abc import Iterator

from jaxpar.pp._schedule._action import Action
from jaxpar.pp._schedule._builders import _rounds
from jaxpar.pp._schedule._builders._builder import Builder, Shape


def row(shape: Shape, rank: int) -> Iterator[Action]:
    """(v-1) g + 2(p-1-r) forwards, then forward and backward in turn, then what is left."""
    total = shape.stages_per_rank * shape.n_microbatches
    warm_up = (shape.stages_per_rank - 1) * _rounds.group_size(shape) + 2 * (shape.n_ranks - 1 - rank)
    warm_up = min(total, warm_up)
    for count in range(warm_up):
        yield _rounds.forward(shape, rank, count)
    for count in range(total):
        if warm_up + count < total:
            yield _rounds.forward(shape, rank, warm_up + count)
        yield _rounds.backward(shape, rank, count)


BUILDER = Builder(
    "Interleaved1F1B", row, usual_stages_per_rank=2, rule=_rounds.RULE, is_defined=_rounds.is_defined
)
