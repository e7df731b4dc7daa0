"""Collectives as data: one frozen row per instruction, a table that counts, sums and prints."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import rich.console
import rich.table

from jaxpar._errors import CollectiveError, MeshError
from jaxpar.debug._groups import Groups
from jaxpar.debug._text import format_bytes, format_table, html_table, rich_table, short_list

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "broadcast")
AxisQuery = str | Sequence[str]

_HEADER = ("kind", "axis", "count", "bytes", "dtype", "operands", "sent", "where")
_RIGHT = (2, 3, 5, 6)
_SHOWN_GROUPS = 4


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program; sizes are of one execution on one device.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, collective_permute or broadcast.
        axis: Mesh axis it runs over; a tuple when several; None when no mesh is known or the groups are not
            whole axes.
        groups: Positions in the mesh that communicate; for a collective_permute (source, target) pairs.
        count: Executions per run of the program, loops multiplied out.
        is_count_known: False inside a loop whose trip count the program does not tell; `count` then is for one
            iteration.
        operand_bytes: Bytes that a device puts in.
        result_bytes: Bytes that a device gets.
        wire_bytes: Bytes that a device sends if the collective runs as a ring.
        dtype: Element type on the wire; several, joined by `+`, for a combined collective.
        num_operands: Arrays in this one instruction (XLA combines collectives; XLA:CPU splits an all_to_all).
        where: entry or loop.
        is_conditional: Inside a branch of a conditional: it may not run.
        op_name: Name stack of the JAX code it came from.
        instruction: Name in the HLO text.
    """

    kind: str
    axis: str | tuple[str, ...] | None
    groups: Groups = dataclasses.field(repr=False)
    count: int
    is_count_known: bool
    operand_bytes: int
    result_bytes: int
    wire_bytes: int
    dtype: str
    num_operands: int
    where: str
    is_conditional: bool
    op_name: str
    instruction: str

    @property
    def bytes(self) -> int:
        """The full buffer of one execution on one device: what goes in or comes out, whichever is larger."""
        return max(self.operand_bytes, self.result_bytes)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes as a tuple; empty when they have no name."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis or ()

    @property
    def phase(self) -> str:
        """forward, backward or recompute if JAX's name stack tells, else the empty string."""
        if "rematted_computation" in self.op_name:
            return "recompute"
        if "transpose(" in self.op_name:
            return "backward"
        return "forward" if "jvp(" in self.op_name else ""


@dataclass(frozen=True, repr=False)
class CollectiveTable:
    """All collectives of one program, in program order.

    Attributes:
        rows: One for each instruction.
        axis_sizes: (name, size) of each axis of the program's mesh; empty when no mesh is known.
    """

    rows: tuple[Collective, ...]
    axis_sizes: tuple[tuple[str, int], ...] = ()

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, kind: str | None = None, axis: AxisQuery | None = None) -> tuple[Collective, ...]:
        """Rows of one kind and over exactly these axes; None means any. Axes of size 1 are ignored.

        Raises:
            CollectiveError: The kind is unknown.
            MeshError: The axis is not in the program's mesh, or no mesh is known.
        """
        if kind is not None and kind not in KINDS:
            raise CollectiveError(f"Collective kind {kind!r} is unknown. Kinds are {', '.join(KINDS)}.")
        axes = None if axis is None else self._axes(axis)
        rows = (row for row in self.rows if kind in (None, row.kind))
        return tuple(row for row in rows if axes is None or (axes and set(row.axes) == axes))

    def count(self, kind: str | None = None, axis: AxisQuery | None = None) -> int:
        """Executions per run of the program."""
        return sum(row.count for row in self.select(kind, axis))

    def bytes(self, kind: str | None = None, axis: AxisQuery | None = None) -> int:
        """Sum of `count` times `Collective.bytes`: full buffers per device and run."""
        return sum(row.count * row.bytes for row in self.select(kind, axis))

    def wire_bytes(self, kind: str | None = None, axis: AxisQuery | None = None) -> int:
        """Bytes that a device sends per run, if every collective runs as a ring."""
        return sum(row.count * row.wire_bytes for row in self.select(kind, axis))

    @property
    def total(self) -> int:
        """Executions of all collectives per run."""
        return self.count()

    def to_dicts(self) -> list[dict[str, object]]:
        """Rows as plain dicts (JSON-able), with `bytes` and `phase`."""
        return [dataclasses.asdict(row) | {"bytes": row.bytes, "phase": row.phase} for row in self.rows]

    def __str__(self) -> str:
        rows = self._cells()
        return format_table(_HEADER, rows, right=_RIGHT) if rows else "no collectives"

    __repr__ = __str__

    def __rich__(self) -> rich.table.Table:
        return rich_table(_HEADER, self._cells(), right=_RIGHT)

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._cells()) if self.rows else "<p>no collectives</p>"

    def show(self) -> None:
        """Print as a rich table."""
        rich.console.Console().print(self)

    def _axes(self, axis: AxisQuery) -> set[str]:
        sizes = dict(self.axis_sizes)
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        if unknown := [name for name in names if name not in sizes]:
            reason = f"its axes are {tuple(sizes)}" if sizes else "no mesh is known for it: pass mesh="
            raise MeshError(f"Axis {unknown[0]!r} is not in the mesh of this program; {reason}.")
        return {name for name in names if sizes[name] > 1}

    def _cells(self) -> list[tuple[str, ...]]:
        """Printed rows: rows that differ only in where they came from are one, with their counts added."""
        counts: collections.Counter[tuple[str, ...]] = collections.Counter()
        for row in self.rows:
            counts[_key(row)] += row.count
        return [(kind, axis, f"{n}{unknown}", *rest) for (kind, axis, unknown, *rest), n in counts.items()]


def _key(row: Collective) -> tuple[str, ...]:
    where = row.where + (", conditional" if row.is_conditional else "")
    return (
        row.kind,
        ", ".join(row.axes) or _short(row.groups),
        "" if row.is_count_known else " x ?",
        format_bytes(row.bytes),
        row.dtype,
        f"{row.num_operands}",
        format_bytes(row.wire_bytes),
        where,
    )


def _short(groups: Groups) -> str:
    shown = " ".join("(" + short_list(group) + ")" for group in groups[:_SHOWN_GROUPS])
    return shown + (f" ... {len(groups)} groups" if len(groups) > _SHOWN_GROUPS else "")
