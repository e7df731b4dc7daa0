"""Make a schedule from costs: every rank, whenever it is free, takes what a policy says.

    free at t     ready backward / ready forward, if memory allows            in turn, when both are ready
                  else a postponed W, if it fits the gap before the next arrival
                  else wait for the next arrival

The shape of the zero-bubble paper's heuristic (Qi et al. 2024, arXiv 2401.10241, section 3.1): forwards up to a limit,
then a backward and a forward in turn, weight gradients into gaps or when memory is needed. Its knobs are a `Policy`;
`auto_schedule` tries many.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._costs import Costs


@dataclass(frozen=True)
class Policy:
    """The knobs of the greedy scheduler.

    lead: How many activations a rank lets into flight, in multiples of what 1F1B holds there.
    fill: A W starts in a gap if the gap is at least this part of it: 1 only if it fits, 0 always.
    splits: Whether I and W are apart; else one B.
    goes_deep: Among ready forwards the one furthest along, or the oldest microbatch.
    prefers_backward: When a forward and a backward are ready, the backward, instead of both in turn.
    """

    lead: float
    fill: float
    splits: bool
    goes_deep: bool
    prefers_backward: bool = False


@dataclass(frozen=True)
class Problem:
    """What is to be scheduled: stages on ranks, microbatches, costs, and the memory that each rank may use."""

    rank_of_stage: tuple[int, ...]
    n_microbatches: int
    costs: Costs
    memory_limit: tuple[float, ...]

    @property
    def n_ranks(self) -> int:
        """Ranks, one for each limit."""
        return len(self.memory_limit)


def greedy_rows(problem: Problem, policy: Policy) -> list[list[Action]]:
    """The rows that the policy makes."""
    return _Greedy(problem, policy).run()


@dataclass
class _Rank:
    """One rank while it is being scheduled; `stages` in the direction of flow."""

    stages: list[int]
    reserve: dict[
        int, float
    ]  # of each stage, memory that its forward must leave for the later stages of this rank
    limit: float
    most_in_flight: float
    free_at: float = 0.0
    held: float = 0.0
    in_flight: int = 0
    last_was_forward: bool = False
    postponed: deque[Action] = field(default_factory=deque)
    row: list[Action] = field(default_factory=list)


class _Greedy:
    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem, self.policy, self.costs = problem, policy, problem.costs
        n_stages = len(problem.rank_of_stage)
        self.last = n_stages - 1
        # When the next microbatches may start on each stage, in microbatch order.
        self.inputs: list[deque[float]] = [deque() for _ in range(n_stages)]
        self.gradients: list[deque[float]] = [deque() for _ in range(n_stages)]
        self.inputs[0].extend([0.0] * problem.n_microbatches)
        self.num_forward, self.num_backward = [0] * n_stages, [0] * n_stages
        self.link_free: dict[tuple[int, int], float] = {}
        self.ranks = [self._rank(rank) for rank in range(problem.n_ranks)]
        self.events = [(0.0, rank) for rank in range(problem.n_ranks)]

    def _rank(self, rank: int) -> _Rank:
        stages = [stage for stage, owner in enumerate(self.problem.rank_of_stage) if owner == rank]
        weights = [self.costs.memory(stage)[0] for stage in stages]
        reserve = {stage: sum(weights[i + 1 :]) for i, stage in enumerate(stages)}
        as_1f1b = sum(self.last + 1 - stage for stage in stages) / max(len(stages), 1)
        most = (
            max(len(stages), math.ceil(self.policy.lead * as_1f1b))
            if self.policy.lead < math.inf
            else math.inf
        )
        return _Rank(stages, reserve, self.problem.memory_limit[rank], most)

    def run(self) -> list[list[Action]]:
        while self.events:
            now, rank = heapq.heappop(self.events)
            state = self.ranks[rank]
            if now < state.free_at:
                continue
            action = self._choose(state, now)
            if action is not None:
                self._start(rank, state, action, now)
        return [state.row for state in self.ranks]

    def _choose(self, state: _Rank, now: float) -> Action | None:
        """The action to start now; None to wait for an arrival, for which an event is due."""
        options: list[Callable[[], Action | None]] = [
            lambda: self._ready_backward(state, now),
            lambda: self._ready_forward(state, now),
        ]
        if not self.policy.prefers_backward and not state.last_was_forward:
            options.reverse()
        for option in options:
            if (action := option()) is not None:
                return action
        if state.postponed and self._may_fill(state, now):
            return state.postponed.popleft()
        return None

    def _ready_backward(self, state: _Rank, now: float) -> Action | None:
        ready = [stage for stage in state.stages if self.gradients[stage] and self.gradients[stage][0] <= now]
        if not ready:
            return None
        stage = min(ready, key=lambda stage: (self.num_backward[stage], -stage))
        return Action(stage, Op.I if self.policy.splits else Op.B, self.num_backward[stage])

    def _ready_forward(self, state: _Rank, now: float) -> Action | None:
        ready = [
            stage
            for stage in state.stages
            if self.inputs[stage] and self.inputs[stage][0] <= now and self._has_room(state, stage)
        ]
        if not ready:
            return None
        stage = max(ready) if self.policy.goes_deep else min(ready, key=lambda s: (self.num_forward[s], -s))
        return Action(stage, Op.F, self.num_forward[stage])

    def _has_room(self, state: _Rank, stage: int) -> bool:
        is_first_here = stage == state.stages[0]
        if is_first_here and state.in_flight + len(state.stages) - 1 >= state.most_in_flight:
            return False
        return state.held + self.costs.memory(stage)[0] + state.reserve[stage] <= state.limit * (1 + 1e-9)

    def _may_fill(self, state: _Rank, now: float) -> bool:
        """Whether a postponed W may start: the gap is long enough, nothing is known to come, or memory is needed."""
        arrivals = [
            queue[0]
            for stage in state.stages
            for queue in (self.inputs[stage], self.gradients[stage])
            if queue
        ]
        to_come = [arrival for arrival in arrivals if arrival > now]
        if len(to_come) < len(arrivals) or not to_come:  # something waits for memory, or nothing is known
            return True
        return min(to_come) - now >= self.policy.fill * self.costs.of(state.postponed[0])

    def _start(self, rank: int, state: _Rank, action: Action, now: float) -> None:
        stage, op = action.stage, action.op
        end = state.free_at = now + self.costs.of(action)
        state.row.append(action)
        state.last_was_forward = op == Op.F if op != Op.W else state.last_was_forward
        whole, kept = self.costs.memory(stage)
        if op == Op.F:
            self.inputs[stage].popleft()
            self.num_forward[stage] += 1
            state.held += whole
            state.in_flight += 1
            if stage < self.last:
                self._send(rank, stage, stage + 1, end, self.inputs)
            else:
                self.gradients[stage].append(end)
        elif op == Op.W:
            state.held -= kept
        else:
            self.gradients[stage].popleft()
            self.num_backward[stage] += 1
            state.in_flight -= 1
            state.held -= whole - kept if op == Op.I else whole
            if op == Op.I:
                state.postponed.append(Action(stage, Op.W, action.microbatch))
            if stage > 0:
                self._send(rank, stage, stage - 1, end, self.gradients)
        heapq.heappush(self.events, (end, rank))

    def _send(self, rank: int, stage: int, to: int, end: float, queues: list[deque[float]]) -> None:
        peer = self.problem.rank_of_stage[to]
        arrival = end
        if peer != rank:
            start = max(end, self.link_free.get((rank, peer), 0.0))
            self.link_free[rank, peer] = sent = start + self.costs.on_link(stage)
            arrival = sent + self.costs.latency
        queues[to].append(arrival)
        heapq.heappush(self.events, (arrival, peer))
