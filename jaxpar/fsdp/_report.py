"""`sharding_report`: one row per parameter: how it is stored, what it costs on each device, and why.

parameter   shape      dtype     placements    per device   reason
gate        []         float32   dp R                 4 B   a scalar has no dim
kernel      [16, 8]    float32   dp S(0)             64 B
odd         [5, 3]     float32   flat dp S(0)         8 B   no dim of [5, 3] divides by 8: stored flat and padded

bytes per device = (bytes of what is sharded) / (number of parts) + bytes of what is whole on every device
"""

import dataclasses
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rich.box
import rich.console
import rich.filesize
import rich.table
from flax import nnx
from jax.sharding import NamedSharding

from jaxpar._named import NamedArray, named_arrays, splitting_axes
from jaxpar._record import is_flat, record_of
from jaxpar.mesh import Placement, spec_to_placements

# A rule below the header and above the footer, in ASCII.
_BOX = rich.box.Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)
_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]


@dataclass(frozen=True)
class ParameterRow:
    """How one parameter (or one array of an optimizer) is stored.

    Attributes:
        name: Dotted name.
        shape: Global shape as the model's code sees it, without padding.
        dtype: Stored dtype.
        placements: Mesh axis and placement of the stored array, for each axis; empty if it is not on a mesh.
        is_flat: Stored flat and padded.
        stored_bytes: Global bytes of the stored array: with padding, copies counted once.
        num_parts: Into how many parts it is split; 1: whole on every device that holds it.
        reason: Why it is not sharded along a dim of its own; empty if it is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[tuple[str, Placement], ...]
    is_flat: bool
    stored_bytes: int
    num_parts: int
    reason: str

    @property
    def size(self) -> int:
        """Number of elements, without padding."""
        return math.prod(self.shape)

    @property
    def bytes_per_device(self) -> int:
        """Bytes on each device that holds it, with padding."""
        return self.stored_bytes // self.num_parts

    def cells(self) -> tuple[str, ...]:
        """What the table shows."""
        where = ", ".join(f"{axis} {placement}" for axis, placement in self.placements) or "not on a mesh"
        placed = f"flat {where}" if self.is_flat else where
        return (
            self.name,
            f"{list(self.shape)}",
            self.dtype,
            placed,
            _bytes(self.bytes_per_device),
            self.reason,
        )


@dataclass(frozen=True, repr=False)
class ShardingReport:
    """What `sharding_report` found; prints as a table, also in rich and in notebooks.

    Attributes:
        rows: One for each parameter, in the model's order.
    """

    rows: tuple[ParameterRow, ...]

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, without padding and copies."""
        return sum(row.size for row in self.rows)

    @property
    def bytes(self) -> int:
        """Global bytes as stored: with padding, copies counted once."""
        return sum(row.stored_bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that a device holds: those of its parts and of what is whole on it."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def replicated_bytes(self) -> int:
        """Bytes per device of what is whole on every device: they do not shrink with the number of devices."""
        return sum(row.stored_bytes for row in self.rows if row.num_parts == 1)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Rows as plain dicts (JSON-able), with `bytes_per_device`."""
        return [
            dataclasses.asdict(row)
            | {"placements": {axis: str(placement) for axis, placement in row.placements}}
            | {"bytes_per_device": row.bytes_per_device}
            for row in self.rows
        ]

    def __str__(self) -> str:
        out = io.StringIO()
        # Within Jupyter a console would display the table instead of writing it to the file.
        console = rich.console.Console(file=out, width=10_000, color_system=None, force_jupyter=False)
        console.print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines() if line.strip())

    __repr__ = __str__

    def __rich__(self) -> rich.table.Table:
        table = rich.table.Table(box=_BOX, show_edge=False, show_footer=True, pad_edge=False)
        columns = ("parameter", "shape", "dtype", "placements", "per device", "reason")
        for k, (name, footer) in enumerate(zip(columns, self._totals(), strict=True)):
            table.add_column(name, footer, justify="right" if k == 4 else "left", no_wrap=k == 0)
        for row in self.rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row.cells()))
        return table

    def _repr_mimebundle_(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> dict[str, str]:
        return self.__rich__()._repr_mimebundle_(include, exclude)

    def show(self) -> None:
        """Print as a rich table."""
        rich.console.Console().print(self)

    def _totals(self) -> tuple[str, ...]:
        whole = f"{_bytes(self.replicated_bytes)} whole on every device"
        return (
            "total",
            f"{self.num_parameters:,}",
            "",
            f"{_bytes(self.bytes)} in all",
            _bytes(self.bytes_per_device),
            whole,
        )


def sharding_report(module: nnx.Module | nnx.Optimizer) -> ShardingReport:
    """Reports how each parameter of a model, or each array of an optimizer, is sharded, and why not (design rule 6).

    Everything is read from the arrays' own shardings. PyTorch has no such report: `fully_shard` pads dim 0 silently.

    Args:
        module: a model, concrete or abstract (`nnx.eval_shape`), or an `nnx.Optimizer`.

    Returns:
        Rows and totals, to print, to `show()`, to end a notebook cell with, or to assert on: `rows`, `num_parameters`,
        `bytes`, `bytes_per_device`, `replicated_bytes`.

    Example:
        >>> from flax import nnx
        >>> from jaxpar.fsdp import fully_shard, sharding_report
        >>> from jaxpar.mesh import init_device_mesh
        >>> print(sharding_report(fully_shard(nnx.Linear(16, 4, rngs=nnx.Rngs(0)), init_device_mesh((8,), ("dp",)))))
        parameter   shape     dtype     placements     per device   reason
        ----------------------------------------------------------------------------------------------------------------------------
        bias        [4]       float32   dp R                 16 B   no dim of [4] divides by 8; smaller than pad_above_bytes=1048576
        kernel      [16, 4]   float32   dp S(0)              32 B
        ----------------------------------------------------------------------------------------------------------------------------
        total       68                  272 B in all         48 B   16 B whole on every device
    """
    kind = nnx.OptState if isinstance(module, nnx.Optimizer) else nnx.Param
    return ShardingReport(tuple(_row(array) for array in named_arrays(module, kind)))


def _row(array: NamedArray) -> ParameterRow:
    x, sharding = array.value, getattr(array.value, "sharding", None)
    stored = tuple(getattr(x, "shape", ()))
    part = stored if sharding is None else sharding.shard_shape(stored)
    placements = ()
    if isinstance(sharding, NamedSharding):
        found = spec_to_placements(sharding, ndim=len(stored))
        placements = tuple(zip(sharding.mesh.axis_names, found, strict=True))
    return ParameterRow(
        name=array.name,
        shape=array.shape,
        dtype=str(array.dtype),
        placements=placements,
        is_flat=is_flat(array.variable),
        stored_bytes=math.prod(stored) * array.dtype.itemsize,
        num_parts=math.prod(stored) // max(1, math.prod(part)) or 1,
        reason=_reason(array),
    )


def _reason(array: NamedArray) -> str:
    record = record_of(array.variable)
    if record is None:
        is_parameter = isinstance(array.variable, nnx.Param)
        return "not below any unit" if is_parameter else "belongs to no parameter below a unit"
    if record.dim is None or is_flat(array.variable):
        return record.reason
    if set(record.axes) <= set(splitting_axes(getattr(array.value, "sharding", None))):
        return ""
    return f"its array is not split over {', '.join(record.axes)}"


def _bytes(num_bytes: int) -> str:
    unit, suffix = rich.filesize.pick_unit_and_suffix(num_bytes, _UNITS, 1024)
    return f"{num_bytes / unit:.4g} {suffix}"
