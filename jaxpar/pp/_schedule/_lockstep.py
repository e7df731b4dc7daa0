"""A schedule as a tick loop: nobody starts a column before everybody has ended the one before.

    tick     0      1      2           a tick lasts as long as its slowest rank, then as long as its messages
    rank 0 |0F0 > |0F1 > |      |
    rank 1 |      |1F0   |1B0 > |
"""

from jaxpar.pp._schedule._action import COMMUNICATION, COMPUTE, Action
from jaxpar.pp._schedule._costs import Costs
from jaxpar.pp._schedule._grid import Rows
from jaxpar.pp._schedule._laws import find_cells
from jaxpar.pp._schedule._links import Links, Step
from jaxpar.pp._schedule._needs import Where, needs
from jaxpar.pp._schedule._passes._bubbles import earliest_rows
from jaxpar.pp._schedule._schedule import Schedule
from jaxpar.pp._schedule._timeline import Event, Timeline


def in_lockstep(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of a tick loop over the schedule's columns."""
    rows = ticks(schedule)
    links = Links(costs, schedule.rank_of_stage)
    events: list[list[Event]] = [[] for _ in rows]
    slowest: Step | None = None
    now = 0.0
    for tick in range(max(map(len, rows))):
        running = [
            Event(rank, action, now, now + costs.of(action))
            for rank, row in enumerate(rows)
            if tick < len(row) and (action := row[tick]) is not None
        ]
        if not running:
            continue
        for event in running:
            events[event.rank].append(event)
        slowest = Step(max(running, key=lambda event: event.end), slowest)
        now = slowest.item.end
        posted = [links.post(part, now, slowest) for event in running for part in event.action.parts]
        sent = [message for message in posted if message is not None]
        if sent and (late := max(sent, key=lambda step: step.item.arrival)).item.arrival > now:
            slowest, now = late, late.item.arrival
    assert slowest is not None, "a schedule computes something"
    return Timeline(schedule, costs, tuple(map(tuple, events)), tuple(links.messages), slowest.path())


def ticks(schedule: Schedule) -> Rows:
    """Rows without messages whose columns are ticks: the schedule's own if they are, else the earliest ones."""
    rows = schedule.rows
    if schedule.has_communication:
        rows = [[action for action in row if action is None or action.op not in COMMUNICATION] for row in rows]
    where = find_cells(rows) if schedule.has_communication else schedule.cells
    if _columns_are_ticks(rows, where, n_stages=schedule.n_stages):
        return rows
    return earliest_rows(rows, where, schedule.rank_of_stage)


def _columns_are_ticks(rows: Rows, where: Where, *, n_stages: int) -> bool:
    """Whether everything that an action uses stands in an earlier column."""

    def is_ready(part: Action, tick: int) -> bool:
        return part.op not in COMPUTE or all(where[k][1] < tick for k in needs(part, where, n_stages=n_stages))

    return all(
        is_ready(part, tick)
        for row in rows
        for tick, action in enumerate(row)
        if action is not None
        for part in action.parts
    )
