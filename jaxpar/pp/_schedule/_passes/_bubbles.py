"""Put bubbles where a rank waits, or take them away: the order of actions stays.

0F0 0B0     with_bubbles     0F0  .   .  0B0       every action takes one tick and starts as early as it can
1F0 1B0     ----------->      .  1F0 1B0
"""

from jaxpar.pp._schedule._action import COMPUTE, Action
from jaxpar.pp._schedule._cells import Cells
from jaxpar.pp._schedule._grid import Rows
from jaxpar.pp._schedule._passes._rebuilt import rebuilt
from jaxpar.pp._schedule._schedule import Schedule
from jaxpar.pp._schedule._walk import walk


def with_bubbles(schedule: Schedule) -> Schedule:
    """The same order, every action at the earliest tick at which its inputs are there; one tick per action.

    Args:
        schedule: Any schedule; its own bubbles are dropped first.

    Returns:
        A grid whose columns are ticks: what an action uses stands in an earlier column, on whatever rank.

    Example:
        >>> print(with_bubbles(Schedule([["0F0", "0B0"], ["1F0", "1B0"]])))
        rank 0 | 0F0  .   .  0B0
        rank 1 |  .  1F0 1B0  .
    """
    return rebuilt(schedule, earliest_rows(schedule.rows, schedule.cells))


def without_bubbles(schedule: Schedule) -> Schedule:
    """The same order with nothing between the actions.

    Args:
        schedule: Any schedule.

    Example:
        >>> without_bubbles(Schedule([["0F0", "", "0B0"]])).to_csv()
        '0F0,0B0\\n'
    """
    return rebuilt(schedule, [[action for action in row if action is not None] for row in schedule.rows])


def earliest_rows(rows: Rows, cells: Cells) -> list[list[Action | None]]:
    """Rows in which every action stands at its earliest tick."""
    spaced: list[list[Action | None]] = [[] for _ in rows]
    tick_of = [[0] * len(row) for row in rows]
    for rank, step in walk(rows, cells).order:
        action, row = rows[rank][step], spaced[rank]
        assert action is not None
        tick = len(row)
        for part in action.parts:
            if part.op in COMPUTE and (cell := cells.awaited(part)) is not None:
                tick = max(tick, tick_of[cell[0]][cell[1]] + 1)
        row.extend([None] * (tick - len(row)))
        row.append(action)
        tick_of[rank][step] = tick
    return spaced
