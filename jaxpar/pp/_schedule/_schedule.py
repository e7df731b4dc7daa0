"""The schedule object: a grid of actions, lawful by construction.

          step  0   1   2   3   4   5
    rank 0 |   0F0 0F1  .   .  0B0 0B1           rows[0]
    rank 1 |    .  1F0 1F1 1B0 1B1               rows[1]        rank_of_stage == (0, 1)

Everything else reads this object: passes make one from another, the simulator gives it a clock, `render` draws it,
executors run it.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._cells import Cells
from jaxpar.pp._schedule._csv import read_rows, write_rows
from jaxpar.pp._schedule._grid import grid
from jaxpar.pp._schedule._laws import check_laws
from jaxpar.pp._schedule._live import peak_live
from jaxpar.pp._schedule._scan import find_cells, find_owners

Cell = Action | str | None


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in which order; checked when it is made, unchangeable afterwards.

    Laws, in the order in which they are checked: *ownership* (a stage is run by the rank that holds it),
    *completeness* (every stage and microbatch has F once, and B once or I and W once; or the whole schedule only
    goes forward), *order* (no action before what it uses on its own rank), *matching* (if messages are spelled
    out, every crossing has one send and one receive), *progress* (no deadlock, even with one in-order channel per
    pair of ranks), *memory* (if a limit is given).

    Args:
        rows: For each rank its actions, in order; `Action`s, their text, and None or "" for a bubble.
        rank_of_stage: For each stage the rank that holds it; by default the rank whose row computes it.
        memory_limit: The most activations (one stage, one microbatch, from F to the end of B or W) that any rank,
            or each rank, may hold.

    Raises:
        ScheduleError: A law is broken; the message names it, shows the grid with the cell marked, and says how to
            mend it. `error.law` is the law's name.

    Example:
        >>> print(Schedule([["0F0", "0F1", "", "0B0", "0B1"], ["", "1F0", "1B0", "1F1", "1B1"]]))
        rank 0 | 0F0 0F1  .  0B0 0B1
        rank 1 |  .  1F0 1B0 1F1 1B1
    """

    rows: tuple[tuple[Action | None, ...], ...]
    rank_of_stage: tuple[int, ...]
    memory_limit: int | tuple[int, ...] | None

    def __init__(
        self,
        rows: Sequence[Sequence[Cell]],
        rank_of_stage: Sequence[int] | None = None,
        *,
        memory_limit: int | Sequence[int] | None = None,
    ) -> None:
        actions = tuple(tuple(map(_as_action, row)) for row in rows)
        owners = find_owners(actions) if rank_of_stage is None else tuple(rank_of_stage)
        limit = memory_limit if isinstance(memory_limit, int | None) else tuple(memory_limit)
        object.__setattr__(self, "rows", actions)
        object.__setattr__(self, "rank_of_stage", owners)
        object.__setattr__(self, "memory_limit", limit)
        check_laws(actions, self.cells, limit)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.rows, self.rank_of_stage, self.memory_limit))

    @classmethod
    def from_csv(
        cls, source: "str | os.PathLike[str] | TextIO", rank_of_stage: Sequence[int] | None = None
    ) -> "Schedule":
        """Read PyTorch's CSV, with or without communication; bubbles are kept.

        Args:
            source: A path or an open file.
            rank_of_stage: As for the constructor.

        Raises:
            ScheduleError: A cell is no action (line and cell are named), or a law is broken.

        Example:
            >>> import io
            >>> Schedule.from_csv(io.StringIO("0F0,0B0\\n")).n_stages
            1
        """
        return cls(read_rows(source), rank_of_stage)

    def to_csv(self, path: "str | os.PathLike[str] | None" = None) -> str:
        """The schedule as PyTorch's CSV, also written to `path` if one is given; `from_csv` reads it back exactly.

        Args:
            path: Where to write it.

        Example:
            >>> Schedule([["0F0", "", "0B0"]]).to_csv()
            '0F0,,0B0\\n'
        """
        text = write_rows(self.rows)
        if path is not None:
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)
        return text

    @property
    def n_ranks(self) -> int:
        """Ranks, the rows of the grid."""
        return len(self.rows)

    @property
    def n_stages(self) -> int:
        """Stages of the whole pipeline."""
        return len(self.rank_of_stage)

    @functools.cached_property
    def n_microbatches(self) -> int:
        """Microbatches of one step."""
        return len(self.cells.steps[Op.F][0])

    @functools.cached_property
    def cells(self) -> Cells:
        """Where each action of a microbatch stands: (stage, op, microbatch) -> (rank, step).

        >>> Schedule([["0F0", "", "0B0"]]).cells[0, Op.B, 0]
        (0, 2)
        """
        return find_cells(self.rows, self.rank_of_stage)

    @functools.cached_property
    def ops(self) -> frozenset[Op]:
        """The ops that occur; of overlapped pairs those of the parts too."""
        return frozenset(part.op for row in self.rows for a in row if a is not None for part in (a, *a.parts))

    @property
    def is_forward_only(self) -> bool:
        """Whether there is no backward, as in evaluation."""
        return not any(any(self.cells.steps[op]) for op in (Op.B, Op.I))

    @property
    def has_communication(self) -> bool:
        """Whether sends and receives are spelled out."""
        return self.cells.is_lowered

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending.

        Args:
            rank: A rank.

        Example:
            >>> Schedule([["0F0", "1F0", "1B0", "0B0"]]).stages_of_rank(0)
            (0, 1)
        """
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def peak_live(self, *, until: Literal["I", "W"] = "W") -> tuple[int, ...]:
        """For each rank the most activations (one stage, one microbatch) that it holds at once.

        Args:
            until: Whether an activation is held until its weight gradient or only until its input gradient is made.

        Example:
            >>> Schedule([["0F0", "0F1", "0B0", "0B1"]]).peak_live()
            (2,)
        """
        return tuple(peak_live(row, until=Op(until)) for row in self.rows)

    def __str__(self) -> str:
        return grid(self.rows)


def _as_action(cell: Cell) -> Action | None:
    if cell is None or cell == "":
        return None
    if isinstance(cell, Action):
        return cell
    if isinstance(cell, str):
        return Action.parse(cell)
    raise ScheduleError(
        f"law 'grammar' broken: a cell is {cell!r} of type {type(cell).__name__}. "
        'Give an Action, its text such as "2F0", or None for a bubble.',
        law="grammar",
    )
