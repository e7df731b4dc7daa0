"""Zero-bubble schedules on a loop: weight gradients wait, and fill what would be bubbles.

    ZB-H1, p = 2   rank 0 | 0F0 0F1  .  0I0 0W0 0F2 0I1 0W1  .  0I2 0W2
                   rank 1 |  .  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

Rank r makes I at once and each W some operations later, so that early ranks get their gradients soon and late ranks
keep work for the end.

    ZB-H1, InterleavedZeroBubble    warm-up (v-1) g + p-1-r, W later by r     bubble (p-1)(F + max(0, I-W)), peak (v-1) g + p
    ZB-H2                           warm-up 2(p-1-r), W later by 2r           no bubble but the skew at F = I = W, peak 2p-1

With H2 every rank works without a pause from its first action to its last, rank r from time r on.

Sources: Qi et al. 2024, arXiv 2401.10241; PyTorch's ScheduleInterleavedZeroBubble (also called ZB1P).
"""

from collections.abc import Iterator

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._builders import _rounds
from jaxpar.pp._schedule._builders._builder import Builder, Shape


def row(shape: Shape, rank: int) -> Iterator[Action]:
    """As few activations as 1F1B holds: (v-1) g + p-1-r forwards first."""
    warm_up = (shape.stages_per_rank - 1) * _rounds.group_size(shape) + shape.n_ranks - 1 - rank
    return _delayed_weights(shape, rank, warm_up=warm_up, delay=rank)


def h2_row(shape: Shape, rank: int) -> Iterator[Action]:
    """Enough forwards first that no rank waits for its first gradient, enough W left that none waits for its last."""
    return _delayed_weights(shape, rank, warm_up=2 * (shape.n_ranks - 1 - rank), delay=2 * rank)


def _delayed_weights(shape: Shape, rank: int, *, warm_up: int, delay: int) -> Iterator[Action]:
    total = shape.stages_per_rank * shape.n_microbatches
    warm_up = min(total, warm_up)
    for count in range(warm_up):
        yield _rounds.forward(shape, rank, count)
    for count in range(total):
        if warm_up + count < total:
            yield _rounds.forward(shape, rank, warm_up + count)
        yield _rounds.backward(shape, rank, count, Op.I)
        if count >= delay:
            yield _rounds.backward(shape, rank, count - delay, Op.W)
    for count in range(max(0, total - delay), total):
        yield _rounds.backward(shape, rank, count, Op.W)


BUILDER = Builder(
    "InterleavedZeroBubble",
    row,
    aliases=("ZB1P",),
    usual_stages_per_rank=2,
    rule=_rounds.RULE,
    is_defined=_rounds.is_defined,
)
H1_BUILDER = Builder("ZBH1", row, aliases=("ZB-H1",), stages_per_rank=1)
H2_BUILDER = Builder("ZBH2", h2_row, aliases=("ZB-H2",), stages_per_rank=1)
