"""Join the halves of a backward that stand next to each other: I and W become B, which shares their work.

0I0 0W0 0F1 0I1 0F2 0W1      ->      0B0 0F1 0I1 0F2 0W1
"""

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._passes._rebuilt import rebuilt
from jaxpar.pp._schedule._schedule import Schedule


def merge_backward(schedule: Schedule) -> Schedule:
    """Replace every I that its own W follows by one B; source: PyTorch's merge pass (parity 9.2).

    Args:
        schedule: Any schedule. A bubble between the two does not part them.

    Returns:
        The schedule with fewer actions. Where the I was waited for by an earlier stage, that stage now waits for
        the whole B.

    Example:
        >>> merge_backward(Schedule([["0F0", "0I0", "0W0"]])).to_csv()
        '0F0,0B0\\n'
    """
    return rebuilt(schedule, [_merged(row) for row in schedule.rows])


def _merged(row: tuple[Action | None, ...]) -> list[Action | None]:
    merged: list[Action | None] = []
    last = 0  # where the last action stands in `merged`
    for action in row:
        before = merged[last] if merged else None
        if action is not None and before is not None and before.op == Op.I:
            if (action.op, action.stage, action.microbatch) == (Op.W, before.stage, before.microbatch):
                merged[last] = Action(action.stage, Op.B, action.microbatch)
                continue
        if action is not None:
            last = len(merged)
        merged.append(action)
    return merged
