"""DualPipeV: two stages per rank in a V; in the main phase each forward runs together with a backward.

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2 (3F3;0B1) 3B3 0I2 0W2 0I3 0W3
    rank 1 | 1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2 1B2 2I3 1I3 2W3 1W3

The pair hides the communication of one behind the computation of the other. Bubble (p-1)(FB + B - 3W) with FB the time
of a pair; peak 2p + 1 stages' activations. Source: DeepSeek-AI 2024, arXiv 2412.19437, folded to a V as in its
DualPipe repository; PyTorch's ScheduleDualPipeV.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._builders._builder import Builder, Shape
from jaxpar.pp._schedule._placement import v_shape


def row(shape: Shape, rank: int) -> Iterator[Action]:
    """Eight phases: three of warm-up, the paired main phase, four of cool-down."""
    ranks_after = shape.n_ranks - 1 - rank
    a = _Row((rank, shape.n_stages - 1 - rank))
    for _ in range(2 * ranks_after):
        yield a.forward(0)
    for _ in range(rank + 1):
        yield a.forward(0)
        yield a.forward(1)
    for _ in range(ranks_after):
        yield a.for_inputs(1)
        yield a.for_weights()
        yield a.forward(1)
    for turn in range(shape.n_microbatches - shape.n_stages + rank + 1):
        if turn == 0 and ranks_after == 0:  # at the turn of the V this forward feeds the pair's own backward
            yield a.forward(0)
            yield a.backward(1)
        else:
            yield Action.overlap(a.forward(0), a.backward(1))
        yield Action.overlap(a.forward(1), a.backward(0))
    for _ in range(ranks_after):
        yield a.backward(1)
        yield Action.overlap(a.forward(1), a.backward(0))
    whole = rank + 1  # of these 2 (rank + 1) backwards the first half are whole, the others leave W for later
    for turn in range(2 * (rank + 1)):
        chunk = 1 - turn % 2
        yield a.backward(chunk) if turn < whole else a.for_inputs(chunk)
    for _ in range(ranks_after):
        yield a.for_weights()
        yield a.for_inputs(0)
    while a.postponed:
        yield a.for_weights()


@dataclass
class _Row:
    """Counts microbatches of the two stages, and remembers which weight gradients were postponed."""

    stages: tuple[int, int]
    forwards: tuple[Iterator[int], ...] = field(
        default_factory=lambda: (itertools.count(), itertools.count())
    )
    backwards: tuple[Iterator[int], ...] = field(
        default_factory=lambda: (itertools.count(), itertools.count())
    )
    postponed: deque[Action] = field(default_factory=deque)

    def forward(self, chunk: int) -> Action:
        return Action(self.stages[chunk], Op.F, next(self.forwards[chunk]))

    def backward(self, chunk: int) -> Action:
        return Action(self.stages[chunk], Op.B, next(self.backwards[chunk]))

    def for_inputs(self, chunk: int) -> Action:
        action = Action(self.stages[chunk], Op.I, next(self.backwards[chunk]))
        self.postponed.append(Action(action.stage, Op.W, action.microbatch))
        return action

    def for_weights(self) -> Action:
        return self.postponed.popleft()


BUILDER = Builder(
    "DualPipeV",
    row,
    place=v_shape,
    stages_per_rank=2,
    usual_stages_per_rank=2,
    rule="n_microbatches is at least the number of stages, 2 * n_ranks",
    is_defined=lambda shape: shape.n_microbatches >= shape.n_stages,
)
