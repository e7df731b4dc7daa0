"""Run a schedule in one process: Python walks the grid, JAX dispatches to the devices of each stage without waiting.

0F0 0F1  .  0B0       a program per action on the stage's devices; what crosses stages is copied to the devices of the
 .  1F0 1B0 1F1       neighbour (`jax.device_put`), and waits there until its action comes
"""

import collections
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._passes._bubbles import earliest_rows
from jaxpar.pp._schedule._schedule import Schedule
from jaxpar.pp._stage import Stage

Leaves = list[Any]
# On CPU, undrained programs with collectives deadlock beyond 33 (jax 0.10.2, two cores); see mechanics A.1.
MAX_IN_FLIGHT_ON_CPU = 12


@dataclass
class StageArrays:
    """What one stage works on in a step.

    Args:
        params: the parameters it uses.
        fixed: the other variables that it reads only.
        changed: those that its forward changes, as they were before the step; between programs.
        batch: the arrays of the batch that it reads.
        sums: of losses and metrics so far.
        grads: sums of gradients so far.
    """

    params: Leaves
    fixed: Leaves
    changed: Leaves
    batch: Leaves
    sums: Leaves
    grads: Leaves


def run_schedule(
    schedule: Schedule,
    stages: Sequence[Stage],
    arrays: Sequence[StageArrays],
    counts: Sequence[frozenset[int]],
) -> None:
    """Run one step; `arrays` end up with the sums, the gradients, and the changed variables.

    Args:
        schedule: without communication: what crosses stages is copied when it is made.
        stages: the programs of each stage.
        arrays: for each stage what it works on; changed in place.
        counts: for each stage, which of its changed variables every microbatch starts anew with (by position).
    """
    run = _Run(stages, arrays, [list(a.changed) for a in arrays], counts)
    for action in dispatch_order(schedule):
        run.do(action)


@functools.lru_cache(maxsize=32)
def dispatch_order(schedule: Schedule) -> tuple[Action, ...]:
    """All computations in the order in which they are dispatched: tick by tick, so that no device waits for Python."""
    rows = earliest_rows(schedule.rows, schedule.cells)
    ticks = itertools.zip_longest(*rows)
    return tuple(part for tick in ticks for action in tick if action is not None for part in action.parts)


@dataclass
class _Run:
    stages: Sequence[Stage]
    arrays: Sequence[StageArrays]
    before: list[Leaves]
    counts: Sequence[frozenset[int]]
    activations: dict[tuple[int, int], Leaves] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Leaves] = field(default_factory=dict)
    stash: dict[tuple[int, int], tuple[Leaves, Leaves]] = field(default_factory=dict)
    postponed: dict[tuple[int, int], tuple[Leaves, Leaves]] = field(default_factory=dict)
    in_flight: collections.deque[Any] = field(default_factory=collections.deque)

    def do(self, action: Action) -> None:
        assert action.microbatch is not None
        run = {Op.F: self._forward, Op.B: self._backward, Op.I: self._inputs, Op.W: self._weights}[action.op]
        self._throttle(run(action.stage, action.microbatch))

    def _forward(self, s: int, m: int) -> Any:
        stage, a = self.stages[s], self.arrays[s]
        received = self.activations.pop((s, m), [])
        changed = [
            old if i in self.counts[s] else x
            for i, (old, x) in enumerate(zip(self.before[s], a.changed, strict=True))
        ]
        sent, kept, a.changed, a.sums = stage.forward(
            a.params, a.fixed, changed, a.batch, np.int32(m), received, a.sums
        )
        self.stash[s, m] = kept, received
        if s + 1 < len(self.stages):
            self.activations[s + 1, m] = jax.device_put(sent, self.stages[s + 1].received_shardings)
        return a.sums or sent

    def _backward(self, s: int, m: int) -> Any:
        stage, a = self.stages[s], self.arrays[s]
        kept, received = self.stash.pop((s, m))
        before, a.grads = stage.backward(a.params, kept, received, self.gradients.pop((s, m), []), a.grads)
        self._hand_back(s, m, before)
        return a.grads

    def _inputs(self, s: int, m: int) -> Any:
        stage, a = self.stages[s], self.arrays[s]
        kept, received = self.stash.pop((s, m))
        after = self.gradients.pop((s, m), [])
        before, carry = stage.inputs(a.params, kept, received, after)
        self.postponed[s, m] = stage.kept_for_weights(kept, received, after), carry
        self._hand_back(s, m, before)
        return before

    def _weights(self, s: int, m: int) -> Any:
        a = self.arrays[s]
        used, carry = self.postponed.pop((s, m))
        a.grads = self.stages[s].weights(a.params, used, carry, a.grads)
        return a.grads

    def _hand_back(self, s: int, m: int, before: Leaves) -> None:
        if s > 0:
            self.gradients[s - 1, m] = jax.device_put(before, self.stages[s - 1].after_shardings)

    def _throttle(self, result: Any) -> None:
        leaves = jax.tree.leaves(result)
        if leaves and next(iter(leaves[0].devices())).platform == "cpu":
            self.in_flight.append(leaves[0])
            if len(self.in_flight) > MAX_IN_FLIGHT_ON_CPU:
                oldest = self.in_flight.popleft()
                if not oldest.is_deleted():
                    oldest.block_until_ready()
