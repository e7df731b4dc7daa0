"""Write every message between ranks into the grid.

    0F0 0B0     ->     0F0 0SEND_F0 0RECV_B0 0B0
    1F0 1B0            1RECV_F0 1F0 1B0 1SEND_B0

A receive is written into the peer's row at the moment the send is written. So the two rows of a pair of ranks list
their messages in one order, and some order of all cells exists in which every message's ends meet at once: no channel,
however narrow, can deadlock.
"""

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._action import COMPUTE, Action
from jaxpar.pp._schedule._messages import message_out_of
from jaxpar.pp._schedule._passes._rebuilt import rebuilt
from jaxpar.pp._schedule._schedule import Schedule


def add_communication(schedule: Schedule) -> Schedule:
    """Add SEND_F, RECV_F, SEND_B and RECV_B for all that crosses ranks; source: PyTorch's send/recv pass.

    An activation `f32[mb, ...]` of stage s travels to the rank of stage s + 1, a gradient to that of s - 1; nothing is
    sent between stages on one rank, as at the turn of a V.

    Args:
        schedule: Without communication. Bubbles are dropped: what fills them is decided when it runs.

    Raises:
        ScheduleError: Law matching: the grid has sends or receives already.

    Example:
        >>> print(add_communication(Schedule([["0F0", "0B0"], ["1F0", "1B0"]])))
        rank 0 |   0F0    0SEND_F0 0RECV_B0   0B0
        rank 1 | 1RECV_F0   1F0      1B0    1SEND_B0
    """
    if schedule.has_communication:
        raise ScheduleError(
            "law 'matching': add_communication: the schedule has sends and receives already. "
            "Give the compute-only schedule, for instance that of get_schedule.",
            law="matching",
        )
    rows = [[action for action in row if action is not None] for row in schedule.rows]
    written: list[list[Action]] = [[] for _ in rows]
    position = [0] * len(rows)
    compact = rebuilt(schedule, rows)
    # One action per rank and round, ranks ascending: a gradient needs a round for each hop, an activation does not.
    while any(at < len(row) for at, row in zip(position, rows, strict=True)):
        for rank, row in enumerate(rows):
            if position[rank] == len(row) or not _is_ready(compact, row[position[rank]], position):
                continue
            action = row[position[rank]]
            position[rank] += 1
            written[rank].append(action)
            for part in action.parts:
                if (ends := message_out_of(part, schedule.rank_of_stage)) is not None:
                    send, receive = ends
                    written[rank].append(send)
                    written[schedule.rank_of_stage[receive.stage]].append(receive)
    return rebuilt(schedule, written)


def _is_ready(schedule: Schedule, action: Action, position: list[int]) -> bool:
    awaited = (schedule.cells.awaited(part) for part in action.parts if part.op in COMPUTE)
    return all(cell is None or position[cell[0]] > cell[1] for cell in awaited)
