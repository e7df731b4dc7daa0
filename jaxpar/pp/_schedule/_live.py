"""How many activations a rank holds: one from the start of each F to the end of its backward.

The count follows from the order of a row alone, so it needs no clock:

    row    0F0 0F1 0B0 0F2 0B1 0B2         live while it runs   1 2 2 2 2 1
"""

from collections.abc import Iterator, Sequence

from jaxpar.pp._schedule._action import Action, Op


def live_counts(row: Sequence[Action | None], *, until: Op = Op.W) -> Iterator[int]:
    """Activations held during each step of a row.

    Args:
        until: `Op.W` if the stash lives until the weight gradient, `Op.I` if until the input gradient; a full
            backward frees it either way.
    """
    held = 0
    for action in row:
        parts = () if action is None else action.parts
        for part in parts:
            if part.op == Op.F:
                held += 1
        yield held
        for part in parts:
            if part.op == Op.B or part.op == until:
                held -= 1


def peak_live(row: Sequence[Action | None], *, until: Op = Op.W) -> int:
    """The most activations that a row holds at once; a row that only goes forward holds one at a time."""
    if not any(part.op in (Op.B, Op.I) for action in row if action for part in action.parts):
        return int(any(action is not None for action in row))
    return max(live_counts(row, until=until), default=0)
