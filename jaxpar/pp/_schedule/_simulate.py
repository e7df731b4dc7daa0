"""Give a schedule a clock: when does every action start, if each takes what it costs?

rank 0 |0F0|0F1|.......|0B0    |     an action starts when its rank is free and its input has come
           '>        '<              a message enters its link when it is made and the link is free
rank 1 |.....|1F0|1B0    |
"""

from collections.abc import Callable

from jaxpar.pp._schedule._action import COMMUNICATION, Action, Op
from jaxpar.pp._schedule._costs import Costs
from jaxpar.pp._schedule._links import START, Chain, Links
from jaxpar.pp._schedule._lockstep import in_lockstep
from jaxpar.pp._schedule._schedule import Schedule
from jaxpar.pp._schedule._timeline import Event, Timeline
from jaxpar.pp._schedule._walk import walk

_UNIT = Costs()


def simulate(schedule: Schedule, costs: Costs = _UNIT, *, lockstep: bool = False) -> Timeline:
    """Run a schedule on a clock; time is linear in the number of actions.

    Every rank walks its own row; bubbles of the grid are ignored. An action starts when its rank is free and what
    it waits for has come, and keeps its rank for `costs.of(action)`; an overlapped pair starts and ends as one.
    What crosses ranks is a message: it is posted when its producer ends or, in a grid that spells messages out, when
    the sender reaches the SEND (a RECV waits for nothing; the computation does). Messages on one link (two ranks,
    one direction) follow each other, each occupies it for `costs.on_link(stage)` and arrives `costs.latency` later.

    With `lockstep` the schedule is a tick loop, as in one compiled program: its columns are ticks, and a tick lasts
    as long as its slowest rank, then as long as its messages. Columns in which something stands beside or before
    its own input are spaced first, as `with_bubbles` does; SENDs and RECVs are dropped, since a tick loop exchanges
    at the end of every tick. Source: PyTorch's `_simulate_comms_compute` (row 9.2), which knows the order but no time.

    Args:
        schedule: Any schedule.
        costs: Durations, link and memory; by default F = I = W = 1, B = 2 and messages that take no time.
        lockstep: Whether all ranks wait for each other after every action.

    Returns:
        The timeline: makespan, bubble, memory, critical path.

    Raises:
        ScheduleError: Law definition: the costs have a tuple whose length is not the number of stages.

    Example:
        >>> one_f_one_b = Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
        >>> simulate(one_f_one_b).makespan, simulate(one_f_one_b, Costs(latency=0.5)).makespan
        (9.0, 10.0)
    """
    costs.check_stages(schedule.n_stages)
    return in_lockstep(schedule, costs) if lockstep else _event_driven(schedule, costs)


def _event_driven(schedule: Schedule, costs: Costs) -> Timeline:
    chain = Chain()
    links = Links(costs, schedule.rank_of_stage, chain)
    events: list[list[Event]] = [[] for _ in schedule.rows]
    last, free_at = [START] * schedule.n_ranks, [0.0] * schedule.n_ranks
    duration, is_lowered = _durations(costs), schedule.has_communication
    for rank, step in walk(schedule.rows, schedule.cells).order:
        action, start, after = schedule.rows[rank][step], free_at[rank], last[rank]
        assert action is not None
        if action.op in COMMUNICATION:
            links.post(action, start, after)  # a RECV posts nothing
            continue
        parts = action.parts
        for part in parts:
            message = links.come_for(part)
            if message is not None and (arrival := chain.hands_over_at[message]) > start:
                start, after = arrival, message
        free_at[rank] = end = start + duration(action)
        event = Event(rank, action, start, end)
        events[rank].append(event)
        last[rank] = chain.add(event, end, after)
        if not is_lowered:
            for part in parts:
                links.post(part, end, last[rank])
    path = chain.path(last[free_at.index(max(free_at))])
    return Timeline(schedule, costs, tuple(map(tuple, events)), tuple(links.messages), path)


def _durations(costs: Costs) -> Callable[[Action], float]:
    """`costs.of`, looked up once for each op and stage."""
    known: dict[tuple[Op, int], float] = {}

    def duration(action: Action) -> float:
        if action.sub_actions:
            return costs.of(action)
        if (found := known.get((action.op, action.stage))) is None:
            found = known[action.op, action.stage] = costs.of(action)
        return found

    return duration
