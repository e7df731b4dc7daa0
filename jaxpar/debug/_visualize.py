"""Show where arrays lie: a picture of one array, a table of all parameters of a model."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import rich.console
import rich.table
from flax import nnx
from jax.sharding import Sharding

from jaxpar._pytree import leaf_name
from jaxpar.debug._layout import Layout, array_layout
from jaxpar.debug._svg import layout_svg
from jaxpar.debug._text import format_bytes, format_table, html_table, rich_table, short_list

_HEADER = ("leaf", "dtype", "shape", "per device", "spec", "bytes per device")
_RIGHT = (5,)


@dataclass(frozen=True, repr=False)
class ShardingPicture:
    """The layout of one array; prints as a grid of slices and devices, draws itself in notebooks."""

    layout: Layout

    def __str__(self) -> str:
        rank = len(self.layout.shape)
        if rank > 2:
            return "\n".join([self.layout.title, *_dim_lines(self.layout)])
        return f"{self.layout.title}\n{format_table(*_grid(self.layout))}"

    __repr__ = __str__

    def __rich__(self) -> rich.table.Table:
        rank = len(self.layout.shape)
        rows = [(line,) for line in _dim_lines(self.layout)]
        table = rich_table(*_grid(self.layout)) if rank <= 2 else rich_table(("dims",), rows)
        table.title = self.layout.title
        return table

    def to_svg(self) -> str:
        """The picture as SVG text: slices coloured by device, copies in one cell."""
        return layout_svg([("", self.layout)])

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def show(self) -> None:
        """Print as a rich table."""
        rich.console.Console().print(self)


@dataclass(frozen=True, repr=False)
class ShardingTable:
    """The layouts of all leaves of a model or pytree, by dotted name.

    Attributes:
        layouts: Name and layout of each leaf that has a sharding.
        unplaced: Names of the leaves that have none (NumPy arrays, Python numbers).
    """

    layouts: tuple[tuple[str, Layout], ...]
    unplaced: tuple[str, ...]

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all leaves that one device holds."""
        return sum(layout.bytes_per_device or 0 for _, layout in self.layouts)

    @property
    def num_elements(self) -> int:
        """Elements of all leaves, copies counted once."""
        return sum(math.prod(layout.shape) for _, layout in self.layouts)

    def __str__(self) -> str:
        return format_table(_HEADER, self._rows(), right=_RIGHT)

    __repr__ = __str__

    def __rich__(self) -> rich.table.Table:
        return rich_table(_HEADER, self._rows(), right=_RIGHT)

    def to_svg(self) -> str:
        """The pictures of all leaves below each other, as SVG text."""
        return layout_svg(self.layouts)

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows())

    def show(self) -> None:
        """Print as a rich table."""
        rich.console.Console().print(self)

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [
            (
                name,
                x.dtype,
                f"{list(x.shape)}",
                f"{list(x.device_shape)}",
                x.spec,
                format_bytes(x.bytes_per_device or 0),
            )
            for name, x in self.layouts
        ]
        rows += [(name, "", "", "", "not on a device", "") for name in self.unplaced]
        return [*rows, ("total", "", f"{self.num_elements}", "", "", format_bytes(self.bytes_per_device))]


def visualize_sharding(
    target: Any, *, shape: tuple[int, ...] | None = None
) -> ShardingPicture | ShardingTable:
    """Show which device holds which slice of an array, or how every parameter of a model is sharded.

    PyTorch: `visualize_sharding` (row G2), there for one or two dims only; more dims give one line per dim here.

    Args:
        target: A `jax.Array` or `jax.ShapeDtypeStruct` with a sharding; a sharding (with `shape=`); a Flax NNX
            module or any pytree of arrays.
        shape: Global shape, when `target` is a sharding.

    Returns:
        An object to print, to `show()` with rich, or to end a notebook cell with. `to_svg()` gives the picture:
        devices are numbered by their position in the mesh and coloured; devices that hold copies share a cell.

    Raises:
        PlacementError: There is no sharding to show, no shape, or the shape does not fit the sharding.

    Example:
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
        >>> print(visualize_sharding(NamedSharding(mesh, P("tp", None)), shape=(8, 16)))
        [8, 16] P('tp', None) on (dp=2, tp=4), copies over dp
        dim 0 @ tp | dim 1  0:16
        ------------------  ----
        0:2                 0 4
        2:4                 1 5
        4:6                 2 6
        6:8                 3 7
    """
    if isinstance(target, Sharding) or _is_array(target):
        return ShardingPicture(array_layout(target, shape=shape))
    tree = nnx.state(target) if isinstance(target, nnx.Module) else target
    leaves = [(leaf_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    placed = [(n, leaf) for n, leaf in leaves if isinstance(getattr(leaf, "sharding", None), Sharding)]
    names = {name for name, _ in placed}
    return ShardingTable(
        layouts=tuple((name, array_layout(leaf)) for name, leaf in placed),
        unplaced=tuple(name for name, _ in leaves if name not in names),
    )


def _is_array(target: Any) -> bool:
    return hasattr(target, "shape") and hasattr(target, "dtype")


def _grid(layout: Layout) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows: dim 0 goes down, dim 1 goes right; a scalar is one cell."""
    rank = len(layout.shape)
    rows = layout.dims[0].pieces if rank else ((0, 1),)
    columns = layout.dims[1].pieces if rank == 2 else ((0, 1),)
    if rank == 2:
        corner = f"{layout.dims[0].caption(0)} | {layout.dims[1].caption(1)}"
        header = (corner, *(f"{start}:{stop}" for start, stop in columns))
    else:
        header = (layout.dims[0].caption(0) if rank else "scalar", "devices")
    body = []
    for i, (start, stop) in enumerate(rows):
        cells = [short_list(layout.cells[(i, j)[:rank]]) for j in range(len(columns))]
        body.append((f"{start}:{stop}" if rank else "value", *cells))
    return header, body


def _dim_lines(layout: Layout) -> list[str]:
    lines = []
    for number, (dim, size) in enumerate(zip(layout.dims, layout.shape, strict=True)):
        cut = f"{len(dim.pieces)} pieces of {layout.device_shape[number]}" if len(dim.pieces) > 1 else "whole"
        lines.append(f"{dim.caption(number)}: {size}, {cut}")
    return lines
