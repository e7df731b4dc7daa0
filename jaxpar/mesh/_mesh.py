"""A mesh of devices with named axes, and views that name some of its axes.

    mesh = init_device_mesh((2, 2, 2), ("dp", "cp", "tp"))       rank = row-major index

        tp ->      cp=0    cp=1
        dp=0       0 1     2 3            mesh.groups("tp") = (0 1) (2 3) (4 5) (6 7)
        dp=1       4 5     6 7            mesh.groups("dp") = (0 4) (1 5) (2 6) (3 7)

A slice `mesh["tp"]` is a view: it remembers the whole mesh and selects axes of it. Arrays always lie on the whole
mesh, so that a parameter split over `tp` and later over `dp` has one `NamedSharding`, whichever came first.
"""

import math
from dataclasses import dataclass

import jax
import numpy as np

from jaxpar._errors import MeshError
from jaxpar.mesh._axes import AxisNames, as_names, check_new_names, infer_shape, select_axes
from jaxpar.mesh._devices import Device


@dataclass(frozen=True, init=False, repr=False)
class DeviceMesh:
    """Devices laid out along named axes, or a view of some of those axes.

    PyTorch: `DeviceMesh` (rows M2 to M7, M9, M12). Frozen and hashable; two meshes are equal when devices, axis
    names, ranks and selected axes are.

    Attributes:
        jax_mesh: The whole `jax.sharding.Mesh`, also for a slice.
        axis_names: The selected axes, in mesh order.
        ranks: Rank number of each device of `jax_mesh`, row-major. `0, 1, 2 ...` unless the mesh came out of a
            larger one, whose numbers it keeps.

    Example:
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((2, 4), ("dp", "tp"))
        >>> mesh["tp"]
        DeviceMesh((tp=4)) of DeviceMesh((dp=2, tp=4), 'cpu', devices=8)
        >>> mesh.groups("dp")
        ((0, 4), (1, 5), (2, 6), (3, 7))
    """

    jax_mesh: jax.sharding.Mesh
    axis_names: tuple[str, ...]
    ranks: tuple[int, ...]

    def __init__(
        self,
        jax_mesh: jax.sharding.Mesh,
        axis_names: AxisNames | None = None,
        *,
        ranks: tuple[int, ...] | None = None,
    ) -> None:
        """Wrap a `jax.sharding.Mesh`, selecting all axes or those named.

        Raises:
            MeshError: A name is unknown, repeated or out of order; or `ranks` does not number every device once.
        """
        names = jax_mesh.axis_names if axis_names is None else select_axes(jax_mesh, axis_names)
        numbers = tuple(range(jax_mesh.size)) if ranks is None else tuple(ranks)
        if len(set(numbers)) != jax_mesh.size or len(numbers) != jax_mesh.size:
            raise MeshError(
                f"DeviceMesh: ranks={numbers} does not number the {jax_mesh.size} devices of the mesh. "
                "Each device needs one rank of its own. Leave ranks out to number them in row-major order."
            )
        object.__setattr__(self, "jax_mesh", jax_mesh)
        object.__setattr__(self, "axis_names", tuple(names))
        object.__setattr__(self, "ranks", numbers)

    # Sizes.

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the selected axes."""
        return tuple(self.jax_mesh.shape[name] for name in self.axis_names)

    @property
    def ndim(self) -> int:
        """Number of selected axes."""
        return len(self.axis_names)

    @property
    def device_type(self) -> str:
        """Platform of the devices: `cpu`, `gpu`, `tpu`."""
        return self.jax_mesh.devices.flat[0].platform

    def size(self, axis: AxisNames | None = None) -> int:
        """Number of ranks along one axis, or the product over several (default: all selected axes)."""
        names = self.axis_names if axis is None else as_names(self, axis)
        return math.prod(self.jax_mesh.shape[name] for name in names)

    # Views.

    def __getitem__(self, axes: AxisNames) -> "DeviceMesh":
        """Select axes, in mesh order: `mesh["tp"]`, `mesh["dp", "tp"]`.

        Raises:
            MeshError: A name is unknown, repeated or out of order.
        """
        return DeviceMesh(self.jax_mesh, select_axes(self, axes), ranks=self.ranks)

    def flatten(self, axes: AxisNames | None = None, *, name: str | None = None) -> "DeviceMesh":
        """Join several axes into one, ranks in row-major order; the other axes stay.

        PyTorch: `DeviceMesh._flatten` (row M6). The new axis stands where the first of the joined axes stood.

        Args:
            axes: Axes to join, in mesh order; default all selected ones.
            name: Name of the new axis; default the old ones joined by `_`.

        Returns:
            A mesh over the same devices and ranks. Its selected axes are the old ones with the joined ones replaced.

        Raises:
            MeshError: An axis is not there, or the new name is taken.

        Example:
            >>> from jaxpar.mesh import init_device_mesh
            >>> mesh = init_device_mesh((2, 2, 2), ("dp", "cp", "tp"))
            >>> mesh["dp", "cp"].flatten().groups("dp_cp")
            ((0, 2, 4, 6), (1, 3, 5, 7))
        """
        joined = select_axes(self, self.axis_names if axes is None else axes)
        new_name = "_".join(joined) if name is None else name
        rest = [axis for axis in self.jax_mesh.axis_names if axis not in joined]
        check_new_names("flatten", (new_name,), taken=rest)
        at = self.jax_mesh.axis_names.index(joined[0])
        order = _replace(self.jax_mesh.axis_names, joined, joined, at)
        names = _replace(self.jax_mesh.axis_names, joined, (new_name,), at)
        selected = [axis for axis in names if axis == new_name or axis in self.axis_names]
        return self._rearranged(order, names, selected, {new_name: self.size(joined)})

    def unflatten(self, axis: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> "DeviceMesh":
        """Split one axis into several, row-major; the inverse of `flatten`.

        PyTorch: `DeviceMesh._unflatten` (row M7).

        Args:
            axis: The axis to split.
            sizes: Sizes of the new axes; one may be -1.
            names: Names of the new axes.

        Raises:
            MeshError: The sizes do not multiply to the axis' size, or a name is taken.

        Example:
            >>> from jaxpar.mesh import init_device_mesh
            >>> init_device_mesh((8,), ("dp",)).unflatten("dp", (2, 4), ("replicate", "shard"))
            DeviceMesh((replicate=2, shard=4), 'cpu', devices=8)
        """
        (old,) = select_axes(self, axis)
        rest = [other for other in self.jax_mesh.axis_names if other != old]
        check_new_names("unflatten", names, taken=rest)
        full = infer_shape(f"unflatten({old!r})", sizes, names, self.size(old), f"axis {old!r} has size")
        if math.prod(full) != self.size(old):
            raise MeshError(
                f"unflatten: sizes {tuple(sizes)} multiply to {math.prod(full)}, but axis {old!r} has size "
                f"{self.size(old)}. Every rank needs one place. Write -1 for one of the sizes to have it inferred."
            )
        at = self.jax_mesh.axis_names.index(old)
        new_names = _replace(self.jax_mesh.axis_names, (old,), names, at)
        selected = [other for other in new_names if other in names or other in self.axis_names]
        return self._rearranged(
            self.jax_mesh.axis_names, new_names, selected, dict(zip(names, full, strict=True))
        )

    def submeshes(self, axes: AxisNames | None = None) -> tuple["DeviceMesh", ...]:
        """The sibling meshes over `axes`, one for each position on the other axes of the whole mesh.

        PyTorch: `DeviceMesh._get_all_submeshes` (row M9). Unlike a slice, each is a mesh of its own with its own
        devices (pipeline stages live on such meshes); together they cover every device once. They keep the ranks
        of this mesh.

        Example:
            >>> from jaxpar.mesh import init_device_mesh
            >>> [stage.ranks for stage in init_device_mesh((2, 4), ("pp", "dp")).submeshes("dp")]
            [(0, 1, 2, 3), (4, 5, 6, 7)]
        """
        names = select_axes(self, self.axis_names if axes is None else axes)
        devices = self._rows(self.jax_mesh.devices, names)
        ranks = self._rows(self._rank_array(), names)
        sizes = tuple(self.jax_mesh.shape[name] for name in names)
        return tuple(
            DeviceMesh(auto_mesh(row.reshape(sizes), names), ranks=tuple(int(r) for r in numbers))
            for row, numbers in zip(devices, ranks, strict=True)
        )

    # Who is where.

    def groups(self, axis: AxisNames | None = None) -> tuple[tuple[int, ...], ...]:
        """Ranks that communicate over `axis`: one tuple for each position on the other axes of the whole mesh.

        PyTorch: `get_all_groups` (row M5). The groups of an axis (or of several together) partition the ranks.
        """
        names = select_axes(self, self.axis_names if axis is None else axis)
        return tuple(tuple(int(rank) for rank in row) for row in self._rows(self._rank_array(), names))

    def coordinate(self, device_or_rank: Device | int | None = None) -> tuple[int, ...] | None:
        """Position on the selected axes: of a device, of a rank, or of this process' first device in the mesh.

        PyTorch: `get_coordinate` (row M4). None where the device, rank or process is not in the mesh.

        Example:
            >>> from jaxpar.mesh import init_device_mesh
            >>> init_device_mesh((2, 4), ("dp", "tp")).coordinate(6)
            (1, 2)
        """
        if device_or_rank is None:
            return next(iter(self.local_coordinates()), None)
        members = self.ranks if isinstance(device_or_rank, int) else tuple(self.jax_mesh.devices.flat)
        if device_or_rank not in members:
            return None
        return self._coordinate_at(members.index(device_or_rank))

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Position of this process' first device on the selected axes, under PyTorch's name for it."""
        return self.coordinate()

    def local_coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Positions of all of this process' devices on the selected axes, in rank order of the whole mesh."""
        here = jax.process_index()
        flat = enumerate(self.jax_mesh.devices.flat)
        return tuple(self._coordinate_at(index) for index, device in flat if device.process_index == here)

    def get_local_rank(self, axis: str | None = None) -> int | None:
        """Position of this process' first device on one axis (the only one, if none is named).

        Returns:
            The position, or None if this process has no device in the mesh.

        Raises:
            MeshError: The axis is unknown, or none is named and there are several.
        """
        if axis is None and self.ndim != 1:
            raise MeshError(
                f"get_local_rank() needs an axis: {self!r} selects {self.ndim} axes. "
                f"Write mesh.get_local_rank({self.axis_names[0]!r})."
            )
        (name,) = select_axes(self, self.axis_names if axis is None else axis)
        place = self.coordinate()
        return None if place is None else place[self.axis_names.index(name)]

    def __repr__(self) -> str:
        whole = _describe(self.jax_mesh)
        if self.axis_names == self.jax_mesh.axis_names:
            return whole
        return f"DeviceMesh(({_sizes(self.jax_mesh, self.axis_names)})) of {whole}"

    # Machinery.

    def _rank_array(self) -> np.ndarray:
        return np.asarray(self.ranks).reshape(self.jax_mesh.devices.shape)

    def _coordinate_at(self, flat_index: int) -> tuple[int, ...]:
        place = np.unravel_index(flat_index, self.jax_mesh.devices.shape)
        by_name = dict(zip(self.jax_mesh.axis_names, place, strict=True))
        return tuple(int(by_name[name]) for name in self.axis_names)

    def _rows(self, array: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        """`array` (of the whole mesh' shape) as one row per position on the axes that are not in `names`."""
        all_names = self.jax_mesh.axis_names
        order = [name for name in all_names if name not in names] + list(names)
        transposed = array.transpose([all_names.index(name) for name in order])
        return transposed.reshape(-1, math.prod(self.jax_mesh.shape[name] for name in names))

    def _rearranged(
        self, order: tuple[str, ...], names: tuple[str, ...], selected: list[str], new_sizes: dict[str, int]
    ) -> "DeviceMesh":
        """Transpose the whole mesh to axis `order`, then read it as axes `names`."""
        permutation = [self.jax_mesh.axis_names.index(name) for name in order]
        shape = tuple(new_sizes[name] if name in new_sizes else self.jax_mesh.shape[name] for name in names)
        devices = self.jax_mesh.devices.transpose(permutation).reshape(shape)
        ranks = self._rank_array().transpose(permutation).ravel()
        return DeviceMesh(
            auto_mesh(devices, names), tuple(selected), ranks=tuple(int(rank) for rank in ranks)
        )


def auto_mesh(devices: np.ndarray, names: tuple[str, ...]) -> jax.sharding.Mesh:
    """A `jax.sharding.Mesh` with Auto axes, which XLA's partitioner and `shard_map` both serve."""
    return jax.sharding.Mesh(devices, tuple(names), axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def _replace(names: tuple[str, ...], old: tuple[str, ...], new: tuple[str, ...], at: int) -> tuple[str, ...]:
    """`names` without `old`, and with `new` where position `at` was."""
    before = [name for name in names[:at] if name not in old]
    after = [name for name in names[at:] if name not in old]
    return (*before, *new, *after)


def _sizes(mesh: jax.sharding.Mesh, names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={mesh.shape[name]}" for name in names)


def _describe(mesh: jax.sharding.Mesh) -> str:
    num_processes = len({device.process_index for device in mesh.devices.flat})
    processes = f", processes={num_processes}" if num_processes > 1 else ""
    platform = mesh.devices.flat[0].platform
    return f"DeviceMesh(({_sizes(mesh, mesh.axis_names)}), {platform!r}, devices={mesh.size}{processes})"
