"""A schedule as a tick loop: nobody starts a column before everybody has ended the one before.

tick     0      1      2           a tick lasts as long as its slowest rank, then as long as its messages
rank 0 |0F0 > |0F1 > |      |
rank 1 |      |1F0   |1B0 > |
"""

from collections.abc import Sequence

from jaxpar.pp._schedule._action import COMMUNICATION, COMPUTE, Action
from jaxpar.pp._schedule._costs import Costs
from jaxpar.pp._schedule._grid import Rows
from jaxpar.pp._schedule._links import START, Chain, Links
from jaxpar.pp._schedule._passes._bubbles import earliest_rows
from jaxpar.pp._schedule._schedule import Schedule
from jaxpar.pp._schedule._timeline import Event, Timeline


def in_lockstep(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of a tick loop over the schedule's columns."""
    rows = ticks(schedule)
    chain = Chain()
    links = Links(costs, schedule.rank_of_stage, chain)
    events: list[list[Event]] = [[] for _ in rows]
    slowest, now = START, 0.0
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
        longest = max(running, key=lambda event: event.end)
        slowest = chain.add(longest, longest.end, slowest)
        posted = [links.post(part, longest.end, slowest) for event in running for part in event.action.parts]
        sent = [message for message in posted if message is not None]
        # The first of equals: a message that takes no time is not what the next tick waits for.
        slowest = max((slowest, *sent), key=chain.hands_over_at.__getitem__)
        now = chain.hands_over_at[slowest]
    path = chain.path(slowest)
    return Timeline(schedule, costs, tuple(map(tuple, events)), tuple(links.messages), path)


def ticks(schedule: Schedule) -> Rows:
    """Rows without messages whose columns are ticks: the schedule's own if they are, else the earliest ones."""
    if schedule.has_communication:
        schedule = Schedule([_without_messages(row) for row in schedule.rows], schedule.rank_of_stage)
    if _columns_are_ticks(schedule):
        return schedule.rows
    return earliest_rows(schedule.rows, schedule.cells)


def _columns_are_ticks(schedule: Schedule) -> bool:
    """Whether what comes from another rank stands in an earlier column; on its own rank the law of order says so."""
    cells = schedule.cells
    return all(
        (cell := cells.awaited(part)) is None or cell[1] < tick
        for row in schedule.rows
        for tick, action in enumerate(row)
        if action is not None
        for part in action.parts
        if part.op in COMPUTE
    )


def _without_messages(row: Sequence[Action | None]) -> list[Action | None]:
    return [action for action in row if action is None or action.op not in COMMUNICATION]
