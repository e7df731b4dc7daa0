"""Where the pieces of one array lie: each dim cut into pieces, each cell of the grid held by some devices.

    f32[8, 16], P(None, 'tp') over (dp=2, tp=2)          dims:   0: one piece 0:8        1: 0:8, 8:16 @ tp
                                                         cells:  (0, 0): devices 0 2     (0, 1): devices 1 3

Devices that hold the same slice share a cell: they are copies (or, if partial, summands). A device is named by its position in the mesh.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxpar._errors import PlacementError
from jaxpar.debug._text import format_bytes


@dataclass(frozen=True)
class DimLayout:
    """How one dim is cut: (start, stop) of each piece, and the mesh axes that cut it (if they have names)."""

    pieces: tuple[tuple[int, int], ...]
    axes: tuple[str, ...]

    def caption(self, dim: int) -> str:
        """`dim 0 @ dp`."""
        return f"dim {dim}" + (f" @ {', '.join(self.axes)}" if self.axes else "")


@dataclass(frozen=True)
class Layout:
    """The layout of one array.

    Attributes:
        shape: Global shape.
        dtype: Name of the element type; empty when only a sharding is known.
        dims: How each dim is cut.
        cells: Devices, by position in the mesh, for each tuple of piece numbers.
        spec: The partition spec as written in code; the kind of sharding when it has none.
        mesh: Axis sizes as text, e.g. `(dp=2, tp=4)`.
        copied_over: Mesh axes whose devices hold copies.
        partial_over: Mesh axes over which the values are still to be reduced.
        num_devices: Devices in the mesh.
        bytes_per_device: Bytes that one device holds; None when the element type is not known.
    """

    shape: tuple[int, ...]
    dtype: str
    dims: tuple[DimLayout, ...]
    cells: Mapping[tuple[int, ...], tuple[int, ...]]
    spec: str
    mesh: str
    copied_over: tuple[str, ...]
    partial_over: tuple[str, ...]
    num_devices: int
    bytes_per_device: int | None

    @property
    def device_shape(self) -> tuple[int, ...]:
        """Shape of the piece that one device holds (the first piece)."""
        return tuple(dim.pieces[0][1] - dim.pieces[0][0] for dim in self.dims)

    @property
    def title(self) -> str:
        """One line that says it all: type, spec, mesh, bytes."""
        size = "" if self.bytes_per_device is None else f", {format_bytes(self.bytes_per_device)} per device"
        return f"{self.dtype}{list(self.shape)} {self.spec} on {self.mesh}{size}{self.notes}"

    @property
    def notes(self) -> str:
        """`, copies over dp` and `, partial over tp` where they apply."""
        copies = f", copies over {', '.join(self.copied_over)}" if self.copied_over else ""
        return copies + (f", partial over {', '.join(self.partial_over)}" if self.partial_over else "")


def array_layout(value: Any, *, shape: tuple[int, ...] | None = None) -> Layout:
    """The layout of an array, of a `jax.ShapeDtypeStruct`, or of a sharding with a shape.

    Raises:
        PlacementError: There is no sharding to show, no shape, or the shape does not fit the sharding.
    """
    sharding = value if isinstance(value, Sharding) else getattr(value, "sharding", None)
    dims = shape if isinstance(value, Sharding) else tuple(getattr(value, "shape", ()))
    if not isinstance(sharding, Sharding):
        raise PlacementError(
            f"visualize_sharding: {type(value).__name__} has no sharding: it lies in this process' memory, not on a "
            "mesh. Place it first, e.g. with jax.device_put(x, NamedSharding(mesh, P('dp')))."
        )
    if dims is None:
        raise PlacementError(
            "visualize_sharding: a sharding alone has no shape to cut. Write visualize_sharding(sharding, "
            "shape=(8, 16))."
        )
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        raise PlacementError(
            f"visualize_sharding: {sharding} is over an abstract mesh, which names no devices. Use the mesh of "
            "init_device_mesh(...).jax_mesh."
        )
    return _layout(sharding, tuple(dims), getattr(value, "dtype", None))


def _layout(sharding: Sharding, shape: tuple[int, ...], dtype: Any) -> Layout:
    try:
        slices = _without_partial(sharding).devices_indices_map(shape)
    except (ValueError, IndexError) as error:
        raise PlacementError(f"visualize_sharding: shape {shape} does not fit {sharding}: {error}") from error
    named = sharding if isinstance(sharding, NamedSharding) else None
    numbers = _numbers(sharding)
    ranges = {
        numbers[device]: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in slices.items()
    }
    pieces = [tuple(sorted({r[dim] for r in ranges.values()})) for dim in range(len(shape))]
    cells: dict[tuple[int, ...], list[int]] = {}
    for number in sorted(ranges):
        cell = tuple(pieces[dim].index(part) for dim, part in enumerate(ranges[number]))
        cells.setdefault(cell, []).append(number)
    piece_size = math.prod(part[0][1] - part[0][0] for part in pieces)
    return Layout(
        shape=shape,
        dtype="" if dtype is None else str(dtype),
        dims=tuple(DimLayout(p, _axes(named, dim)) for dim, p in enumerate(pieces)),
        cells={cell: tuple(numbers) for cell, numbers in cells.items()},
        spec=format_spec(named.spec) if named else type(sharding).__name__,
        mesh=_mesh_text(sharding),
        copied_over=_copied_over(named),
        partial_over=_partial_over(named),
        num_devices=len(numbers),
        bytes_per_device=None if dtype is None else piece_size * dtype.itemsize,
    )


def _without_partial(sharding: Sharding) -> Sharding:
    """Slices do not depend on what is still to be summed, and JAX (0.12) tells them only where nothing is."""
    if isinstance(sharding, NamedSharding) and sharding.spec.unreduced:
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec.partitions))
    return sharding


def format_spec(spec: PartitionSpec) -> str:
    """A spec as one writes it: `P('dp', None)`."""
    return "P(" + ", ".join(repr(entry) for entry in spec.partitions) + ")"


def _numbers(sharding: Sharding) -> dict[Any, int]:
    """Position in the mesh of each device; the device id where there is no mesh."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return {device: position for position, device in enumerate(sharding.mesh.devices.flat)}
    return {device: device.id for device in sharding.device_set}


def _axes(sharding: NamedSharding | None, dim: int) -> tuple[str, ...]:
    if sharding is None or dim >= len(sharding.spec.partitions):
        return ()
    entry = sharding.spec.partitions[dim]
    names = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(name for name in names if isinstance(name, str))


def _partial_over(sharding: NamedSharding | None) -> tuple[str, ...]:
    if sharding is None:
        return ()
    return tuple(name for name in sharding.mesh.axis_names if name in sharding.spec.unreduced)


def _copied_over(sharding: NamedSharding | None) -> tuple[str, ...]:
    if sharding is None:
        return ()
    used = {name for dim in range(len(sharding.spec.partitions)) for name in _axes(sharding, dim)}
    used.update(_partial_over(sharding))
    return tuple(n for n, size in sharding.mesh.shape.items() if size > 1 and n not in used)


def _mesh_text(sharding: Sharding) -> str:
    if isinstance(sharding, NamedSharding):
        return "(" + ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items()) + ")"
    return f"{len(sharding.device_set)} device" + ("s" if len(sharding.device_set) > 1 else "")
