"""Run a schedule: Python walks the grid, JAX dispatches a program for each action to the devices of its stage.

0F0 0F1  .  0B0       what crosses stages is moved to the devices of the neighbour as soon as it is dispatched, and waits
 .  1F0 1B0 1F1       there until its action comes

All processes walk the whole grid in one order, tick by tick. Each runs the actions of its own stages, and takes part in the
moves to and from them: so no two processes can wait for each other, whatever the transport.
"""

import collections
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.pp._ranks import Ranks
from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._passes._bubbles import earliest_rows
from jaxpar.pp._schedule._schedule import Schedule
from jaxpar.pp._stage import Stage
from jaxpar.pp._transport._protocol import Arrival, Leaves
from jaxpar_launch.flight import FlightRecorder, recorder

Watch = Callable[[Action, float, Leaves], None]
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


@dataclass(frozen=True, eq=False)
class Smaller:
    """Programs for microbatches with one row less.

    Args:
        stages: of each stage.
        first: the first microbatch that is smaller.
    """

    stages: Sequence[Stage]
    first: int


def run_schedule(
    schedule: Schedule,
    stages: Sequence[Stage],
    arrays: Sequence[StageArrays | None],
    counts: Sequence[frozenset[int]],
    ranks: Ranks,
    *,
    rounds: int = 1,
    smaller: Smaller | None = None,
    watch: Watch | None = None,
) -> None:
    """Run one step; `arrays` end up with the sums, the gradients, and the changed variables.

    Args:
        schedule: without communication: what crosses stages is moved when it is made.
        stages: the programs of each stage.
        arrays: for each stage that is here what it works on; changed in place.
        counts: for each stage, which of its changed variables every microbatch starts anew with (by position).
        ranks: where stages lie.
        rounds: how often the schedule runs, on one part of the microbatches after the other.
        smaller: programs for the last microbatches, if they have one row less.
        watch: told of each action when it was dispatched, and what comes of it.

    Raises:
        ProcessGroupError: another rank did not send in time.
    """
    before = [list(a.changed) if a else [] for a in arrays]
    run = _Run(stages, arrays, before, counts, ranks, smaller, watch, keeps=not schedule.is_forward_only)
    for _ in range(rounds):
        for action in dispatch_order(schedule, ranks.stages_here):
            run.do(action)
        run.first += schedule.n_microbatches


@functools.lru_cache(maxsize=32)
def dispatch_order(schedule: Schedule, stages_here: frozenset[int]) -> tuple[Action, ...]:
    """The computations of these stages and of their neighbours, tick by tick, so that no device waits for Python."""
    rows = earliest_rows(schedule.rows, schedule.cells)
    near = stages_here | {s + 1 for s in stages_here} | {s - 1 for s in stages_here}
    ticks = itertools.zip_longest(*rows)
    actions = (part for tick in ticks for action in tick if action is not None for part in action.parts)
    return tuple(action for action in actions if action.stage in near)


@dataclass
class _Run:
    stages: Sequence[Stage]
    arrays: Sequence[StageArrays | None]
    before: list[Leaves]
    counts: Sequence[frozenset[int]]
    ranks: Ranks
    smaller: Smaller | None
    watch: Watch | None
    keeps: bool
    first: int = 0
    flight: FlightRecorder | None = field(default_factory=recorder)
    activations: dict[tuple[int, int], Arrival] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Arrival] = field(default_factory=dict)
    stash: dict[tuple[int, int], tuple[Leaves, Leaves]] = field(default_factory=dict)
    postponed: dict[tuple[int, int], tuple[Leaves, Leaves]] = field(default_factory=dict)
    in_flight: collections.deque[Any] = field(default_factory=collections.deque)

    def do(self, action: Action) -> None:
        assert action.microbatch is not None
        s, m, op = action.stage, self.first + action.microbatch, action.op
        a, made = self.arrays[s], None
        if a is not None:
            if self.flight is not None:
                self.flight.note(f"pipeline: {op.name} of stage {s}, microbatch {m}")
            run = {Op.F: self._forward, Op.B: self._backward, Op.I: self._inputs, Op.W: self._weights}[op]
            dispatched_s = time.perf_counter()
            made = run(a, s, m)
            results = (a.sums if op is Op.F else a.grads if op is not Op.I else []) or made
            if self.watch is not None:
                self.watch(action, dispatched_s, results)
            self._throttle(results)
        if op is Op.F and s + 1 < len(self.stages):
            self._move(self.activations, made, s, s + 1, m)
        elif op in (Op.B, Op.I) and s > 0:
            self._move(self.gradients, made, s, s - 1, m)

    def _forward(self, a: StageArrays, s: int, m: int) -> Leaves:
        stage = self._programs(m)[s]
        received = _taken(self.activations, s, m)
        changed = [
            old if i in self.counts[s] else x
            for i, (old, x) in enumerate(zip(self.before[s], a.changed, strict=True))
        ]
        sent, kept, a.changed, a.sums = stage.forward(
            a.params, a.fixed, changed, a.batch, np.int32(m), received, a.sums
        )
        if self.keeps:
            self.stash[s, m] = kept, received
        return sent

    def _backward(self, a: StageArrays, s: int, m: int) -> Leaves:
        kept, received = self.stash.pop((s, m))
        after = _taken(self.gradients, s, m)
        before, a.grads = self._programs(m)[s].backward(a.params, kept, received, after, a.grads)
        return before

    def _inputs(self, a: StageArrays, s: int, m: int) -> Leaves:
        stage = self._programs(m)[s]
        kept, received = self.stash.pop((s, m))
        after = _taken(self.gradients, s, m)
        before, carry = stage.inputs(a.params, kept, received, after)
        self.postponed[s, m] = stage.kept_for_weights(kept, received, after), carry
        return before

    def _weights(self, a: StageArrays, s: int, m: int) -> Leaves:
        used, carry = self.postponed.pop((s, m))
        a.grads = self._programs(m)[s].weights(a.params, used, carry, a.grads)
        return []

    def _move(
        self,
        arrivals: dict[tuple[int, int], Arrival],
        values: Leaves | None,
        source: int,
        target: int,
        m: int,
    ) -> None:
        """Hand on what a stage made for its neighbour."""
        forth = target > source
        stage = self._programs(m)[target]
        arrival = self.ranks.move(
            values,
            self.ranks.of_stage[source],
            self.ranks.of_stage[target],
            stage.received if forth else stage.after,
            f"{'activations' if forth else 'gradients'} of microbatch {m}, from stage {source} to stage {target}",
        )
        if arrival is not None:
            arrivals[target, m] = arrival

    def _programs(self, m: int) -> Sequence[Stage]:
        return self.stages if self.smaller is None or m < self.smaller.first else self.smaller.stages

    def _throttle(self, result: Leaves) -> None:
        if result and next(iter(result[0].devices())).platform == "cpu":
            self.in_flight.append(result[0])
            if len(self.in_flight) > MAX_IN_FLIGHT_ON_CPU:
                self.ranks.transport.wait([self.in_flight.popleft()])


def _taken(arrivals: dict[tuple[int, int], Arrival], s: int, m: int) -> Leaves:
    """What has come for an action; nothing for the first stage's forward, and the last one's backward."""
    arrival = arrivals.pop((s, m), None)
    return [] if arrival is None else arrival()
