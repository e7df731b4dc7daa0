"""A timeline of what really happened: of each action is known when it was dispatched and when its result was there.

start  =  the latest of: its dispatch, the end of the rank's action before it, the end of the neighbour's action that it uses
"""

from collections.abc import Mapping, Sequence

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._costs import Costs
from jaxpar.pp._schedule._schedule import Schedule
from jaxpar.pp._schedule._timeline import Event, Message, Timeline

Times = Mapping[Action, tuple[float, float]]


def measured_timeline(schedule: Schedule, costs: Costs, times: Times) -> Timeline:
    """The timeline of a run; it begins with the first start.

    Args:
        schedule: what ran; computations alone.
        costs: what its actions take alone; of these the memory counts here.
        times: of every action when it was dispatched and when it ended, by one clock.
    """
    rows = [[part for action in row if action for part in action.parts] for row in schedule.rows]
    waits_for = _waits(rows)
    ends = _corrected({action: end for action, (_, end) in times.items()}, waits_for)
    starts = {
        a: max(min(times[a][0], ends[a]), *(ends[b] for b in waits_for[a])) for a in times if waits_for[a]
    }
    starts |= {a: min(times[a][0], ends[a]) for a in times if a not in starts}
    zero = min(starts.values())
    events = tuple(
        tuple(Event(rank, a, starts[a] - zero, ends[a] - zero) for a in row) for rank, row in enumerate(rows)
    )
    by_action = {event.action: event for row in events for event in row}
    hops = ((by_action[source], by_action[a]) for a, sources in waits_for.items() for source in sources)
    crossing = sorted((hop for hop in hops if hop[0].rank != hop[1].rank), key=lambda hop: hop[0].end)
    messages = tuple(Message(a.rank, b.rank, a.action, a.end, a.end, b.start) for a, b in crossing)
    last = max(by_action.values(), key=lambda event: event.end)
    return Timeline(schedule, costs, events, messages, (last,))


def _waits(rows: Sequence[Sequence[Action]]) -> dict[Action, list[Action]]:
    """Of each action the rank's action before it, and the one whose result it uses, wherever that ran."""
    made = {(a.stage, a.op is Op.F, a.microbatch): a for row in rows for a in row if a.op is not Op.W}
    waits_for: dict[Action, list[Action]] = {}
    for row in rows:
        for before, action in zip((None, *row), row, strict=False):
            step = {Op.F: -1, Op.W: 0}.get(action.op, 1)
            source = made.get((action.stage + step, action.op is Op.F, action.microbatch))
            waits_for[action] = [x for x in (before, source) if x is not None]
    return waits_for


def _corrected(
    ends: dict[Action, float], waits_for: Mapping[Action, Sequence[Action]]
) -> dict[Action, float]:
    """A clock may be looked at late; but what was waited for had ended when the one that waited did."""
    changed = True
    while changed:
        changed = False
        for action, sources in waits_for.items():
            for source in sources:
                if ends[source] > ends[action]:
                    ends[source], changed = ends[action], True
    return ends
