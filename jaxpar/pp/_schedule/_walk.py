"""Walk a grid as its ranks would: each down its own row, waiting where it must.

An action is done as soon as what it waits for is done. Sends and receives are posted without waiting. What is left when
nobody can move is a deadlock.
"""

from collections import deque
from dataclasses import dataclass

from jaxpar.pp._schedule._action import COMPUTE
from jaxpar.pp._schedule._cells import Cells
from jaxpar.pp._schedule._grid import Rows


@dataclass(frozen=True)
class Walk:
    """The cells in an order that respects every wait, and where the ranks stand when nobody can move.

    order: (rank, step) of every action reached. stuck: for each rank that cannot move, its step and the cell
    (rank, step) that it waits for; empty if all is done.
    """

    order: tuple[tuple[int, int], ...]
    stuck: dict[int, tuple[int, tuple[int, int]]]


def walk(rows: Rows, cells: Cells) -> Walk:
    """Let every rank go as far as it can, until all are done or nobody can move."""
    position = [0] * len(rows)  # steps that each rank has done
    stuck: dict[int, tuple[int, tuple[int, int]]] = {}
    waiting: list[list[int]] = [[] for _ in rows]  # on each rank, the ranks that wait for it
    order: list[tuple[int, int]] = []
    runnable = deque(range(len(rows)))
    awaited = cells.awaited
    while runnable:
        rank = runnable.popleft()
        stuck.pop(rank, None)
        row = rows[rank]
        start = step = position[rank]
        while step < len(row):
            action = row[step]
            if action is not None:
                for part in action.sub_actions or (action,):
                    cell = awaited(part) if part.op in COMPUTE else None
                    if cell is not None and position[cell[0]] <= cell[1]:
                        stuck[rank] = step, cell
                        break
                if rank in stuck:
                    waiting[stuck[rank][1][0]].append(rank)
                    break
                order.append((rank, step))
            step += 1
        position[rank] = step
        if step > start:
            runnable.extend(waiting[rank])
            waiting[rank].clear()
    return Walk(tuple(order), stuck)
