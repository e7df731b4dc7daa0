"""Schedules as PyTorch's CSV: one line per rank, actions separated by commas, an empty cell for a bubble."""

import csv
import io
import os
from collections.abc import Iterable
from typing import TextIO

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._action import Action
from jaxpar.pp._schedule._grid import Rows


def write_rows(rows: Rows) -> str:
    """The text of the file; rows keep their own lengths and their bubbles.

    A row without any action is written as one empty cell, as the csv module does.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [["" if action is None else str(action) for action in row] for row in rows]
    )
    return text.getvalue()


def read_rows(source: "str | os.PathLike[str] | TextIO") -> list[list[Action | None]]:
    """Rows of a file, given by path or open."""
    if isinstance(source, (str, os.PathLike)):
        with open(source, newline="", encoding="utf-8") as file:
            return _read(file)
    return _read(source)


def _read(lines: Iterable[str]) -> list[list[Action | None]]:
    rows: list[list[Action | None]] = []
    for rank, cells in enumerate(csv.reader(lines)):
        rows.append([])
        for step, cell in enumerate(cells):
            try:
                rows[-1].append(Action.parse(cell.strip()) if cell.strip() else None)
            except ScheduleError as error:
                raise ScheduleError(f"line {rank + 1}, cell {step + 1}: {error}", law="grammar") from None
    return rows
