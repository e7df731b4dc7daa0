"""ZBV: two stages per rank in a V, so that the loss is where the input is; no bubble at F = I = W, memory of 1F1B.

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 ...       stages 0 and 2p-1
    rank 1 |  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 ...       stages 1 and 2p-2

Bubble: a skew of p-1 at F = I = W; peak 2p stages' activations, as much as p of a rank's. Source: Qi et al. 2024, arXiv
2401.10241, and "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362; PyTorch's ScheduleZBVZeroBubble.
"""

import itertools
from collections.abc import Iterator

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._builders._builder import Builder, Shape
from jaxpar.pp._schedule._placement import v_shape


def row(shape: Shape, rank: int) -> Iterator[Action]:
    """The rows for at least 2p - 1 microbatches, without those that are not there.

    Written as (chunk, op) pairs: chunk 0 is the stage on the way down, chunk 1 the stage on the way up; the
    microbatch of each is how often the pair has come before.
    """
    stages = rank, shape.n_stages - 1 - rank
    counts: dict[tuple[int, Op], Iterator[int]] = {}
    for chunk, op in _pattern(shape.n_ranks, max(shape.n_microbatches, 2 * shape.n_ranks - 1), rank):
        microbatch = next(counts.setdefault((chunk, op), itertools.count()))
        if microbatch < shape.n_microbatches:
            yield Action(stages[chunk], op, microbatch)


def _pattern(n_ranks: int, n_microbatches: int, rank: int) -> Iterator[tuple[int, Op]]:
    down, up = (0, Op.F), (1, Op.F)
    block = [(Op.I, Op.W), (Op.F, Op.I, Op.W)]
    to_turn = n_ranks - rank  # hops from here to the turn of the V
    yield from [down] * (2 * to_turn - 1)
    yield from [up, down] * rank
    yield from [(1, op) for op in block[1]] * to_turn
    left = n_microbatches - (2 * to_turn - 1 + rank)  # forwards of chunk 0 that are not started
    for turn in range(n_microbatches - n_ranks):
        if turn < left:
            yield down
        yield from ((0, op) for op in block[0])
        yield from ((1, op) for op in block[1])
    yield from [(0, Op.I), (1, Op.I)] * rank
    yield from [(0, Op.I), (0, Op.W)] * to_turn
    yield from [(1, Op.W)] * rank
    yield from [(0, Op.W)] * rank


BUILDER = Builder(
    "ZBVZeroBubble",
    row,
    aliases=("ZBV",),
    place=v_shape,
    stages_per_rank=2,
    usual_stages_per_rank=2,
)
