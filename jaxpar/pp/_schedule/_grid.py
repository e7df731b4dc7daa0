"""A schedule as aligned text: one line per rank, one column per step, dots for bubbles, a marker under a cell.

rank 0 | 0F0 0F1  .  0B0 0B1
rank 1 |  .  1F0 1B0 1F1 1B1
                 ^^^
"""

from collections.abc import Sequence

from jaxpar.pp._schedule._action import Action

Rows = Sequence[Sequence[Action | None]]

_WINDOW_STEPS, _WINDOW_RANKS = 6, 4


def grid(rows: Rows, *, mark: tuple[int, int] | None = None) -> str:
    """All ranks and steps; with `mark` the cells around that (rank, step), and a marker under it."""
    ranks, steps = _window(rows, mark)
    cells = [[_cell(rows[rank], step) for step in steps] for rank in ranks]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    labels = [f"rank {rank}" for rank in ranks]
    label_width = max(map(len, labels), default=0)
    lines = []
    if steps and steps.start > 0:
        lines.append(f"(from step {steps.start})")
    for rank, label, row in zip(ranks, labels, cells, strict=True):
        text = " ".join(cell.center(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"{label.ljust(label_width)} | {text}".rstrip())
        if mark is not None and rank == mark[0]:
            before = sum(widths[: mark[1] - steps.start]) + mark[1] - steps.start
            width = widths[mark[1] - steps.start] if mark[1] in steps else 3
            lines.append(" " * (label_width + 3 + before) + "^" * width)
    return "\n".join(lines)


def _window(rows: Rows, mark: tuple[int, int] | None) -> tuple[range, range]:
    num_steps = max(map(len, rows), default=0)
    if mark is None:
        return range(len(rows)), range(num_steps)
    rank, step = mark
    ranks = range(max(0, rank - _WINDOW_RANKS), min(len(rows), rank + _WINDOW_RANKS + 1))
    return ranks, range(max(0, step - _WINDOW_STEPS), min(num_steps, step + _WINDOW_STEPS + 1))


def _cell(row: Sequence[Action | None], step: int) -> str:
    action = row[step] if step < len(row) else None
    return "." if action is None else str(action)
