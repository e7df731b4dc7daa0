"""The message of a broken law: its name, the cell, the grid around it, and how to mend it."""

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._grid import Rows, grid


def broken(law: str, rows: Rows, cell: tuple[int, int], what: str, mend: str) -> ScheduleError:
    """The error for `law`, broken at `cell` = (rank, step)."""
    rank, step = cell
    picture = "\n".join(f"    {line}" for line in grid(rows, mark=cell).splitlines())
    return ScheduleError(
        f"law '{law}' broken at rank {rank}, step {step}: {what}.\n{picture}\n{mend}", law=law
    )
