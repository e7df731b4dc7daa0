"""One global batch out of the slice that each process has read.

    mesh (dp=4), 2 processes x 2 devices, batch_axes=("dp",)

    process 0 feeds rows a b c d        device 0: a b   device 1: c d  \\
    process 1 feeds rows e f g h        device 2: e f   device 3: g h   } one jax.Array of 8 rows, sharded over dp
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar._errors import BatchError
from jaxpar._pytree import PyTree
from jaxpar.data._leaves import num_rows
from jaxpar.mesh import MeshLike, as_jax_mesh, axis_size


def global_batch(batch: PyTree, mesh: MeshLike, batch_axes: str | tuple[str, ...]) -> PyTree:
    """Joins the processes' slices into global arrays, split on dim 0 over the batch axes; nothing is communicated.

    Rows lie in mesh order. Processes at the same position of the batch axes (tensor parallel over processes) feed
    the same rows. In one process the slice is the whole batch.

    Args:
        batch: Pytree of host arrays [n, ...], n rows of this process; equal n on all processes. Arrays that are
            global already pass through if they lie as wanted.
        mesh: The mesh of the step.
        batch_axes: Axes over which the samples are split, in mesh order, such as `("dp",)`.

    Returns:
        Pytree of `jax.Array` f32[N@batch_axes, ...], replicated over the other axes.

    Raises:
        BatchError: n does not divide over this process's positions on the axes, the leaves disagree, or this process
            has no device in the mesh.
        MeshError: An axis is not in the mesh.

    Example:
        >>> import numpy as np
        >>> from jaxpar.mesh import init_device_mesh
        >>> from jaxpar.data import global_batch
        >>> batch = global_batch({"x": np.arange(16)}, init_device_mesh((8,), ("dp",)), ("dp",))
        >>> batch["x"].shape, batch["x"].addressable_shards[1].data
        ((16,), Array([2, 3], dtype=int32))
    """
    sharding = _sharding(mesh, batch_axes)
    num_rows(batch, caller="global_batch")  # its leaves agree
    if all(_lies_as(leaf, sharding) for leaf in jax.tree.leaves(batch)):
        return batch
    _check_local(batch)
    total = _total_rows(batch, mesh, batch_axes)
    return jax.tree.map(lambda leaf: _join_slices(leaf, sharding, total), batch)


def global_shapes(batch: PyTree, mesh: MeshLike, batch_axes: str | tuple[str, ...]) -> PyTree:
    """Shapes and dtypes of what `global_batch` makes; no array is made.

    Raises:
        BatchError: as there.
    """

    def shape(leaf: Any, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *jnp.shape(leaf)[1:]), jnp.result_type(leaf))

    sharding = _sharding(mesh, batch_axes)
    num_rows(batch, caller="global_batch")  # its leaves agree
    if all(_lies_as(leaf, sharding) for leaf in jax.tree.leaves(batch)):
        return jax.tree.map(lambda leaf: shape(leaf, leaf.shape[0]), batch)
    _check_local(batch)
    total = _total_rows(batch, mesh, batch_axes)
    return jax.tree.map(lambda leaf: shape(leaf, total), batch)


def _sharding(mesh: MeshLike, batch_axes: str | tuple[str, ...]) -> NamedSharding:
    axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    axis_size(mesh, axes)  # all of them are there
    return NamedSharding(as_jax_mesh(mesh), P(axes) if len(axes) > 1 else P(*axes))


def _total_rows(batch: PyTree, mesh: MeshLike, batch_axes: str | tuple[str, ...]) -> int:
    """Rows of all processes, from those of this one."""
    axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    num_positions = axis_size(mesh, axes)
    rows = num_rows(batch, caller="global_batch")
    here = len(fed_positions(mesh, axes))
    if rows % here:
        raise BatchError(_does_not_divide(rows, here, axes, num_positions, as_jax_mesh(mesh)))
    return rows // here * num_positions


def _join_slices(leaf: "jax.typing.ArrayLike", sharding: NamedSharding, total: int) -> jax.Array:
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    shape = (total, *jax.numpy.shape(leaf)[1:])
    return jax.make_array_from_process_local_data(sharding, jax.device_get(leaf), shape)


def _lies_as(leaf: object, sharding: NamedSharding) -> bool:
    return isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def _check_local(batch: PyTree) -> None:
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise BatchError(
                f"global_batch: a leaf {leaf.shape} is spread over processes already, but as {leaf.sharding}. Feed"
                " each process's own rows as a NumPy array."
            )


def fed_positions(mesh: MeshLike, batch_axes: str | tuple[str, ...]) -> list[int]:
    """The positions on the batch axes that this process's devices hold, in order: it feeds their rows of dim 0.

    Raises:
        BatchError: This process has no device in the mesh.
        MeshError: An axis is not in the mesh.
    """
    sharding = _sharding(mesh, batch_axes)
    slices = sharding.addressable_devices_indices_map((axis_size(mesh, batch_axes),)).values()
    positions = sorted({(index[0].start or 0) for index in slices if index is not None})
    if not positions:
        raise BatchError(
            f"global_batch: process {jax.process_index()} has no device in the mesh {dict(sharding.mesh.shape)}, so it"
            " has no rows of the batch to feed."
        )
    return positions


def _does_not_divide(
    rows: int, here: int, axes: tuple[str, ...], num_positions: int, mesh: jax.sharding.Mesh
) -> str:
    sizes = " * ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
    share = "" if here == num_positions else f", {here} of them on this process"
    wanted = -(-rows // here) * here
    return (
        f"global_batch: a batch of {rows} samples does not split over batch_axes {sizes} ({num_positions} positions"
        f"{share}): {rows} / {here} leaves {rows % here}. Every device needs equally many rows, so that all run one"
        f" program. Write batch, mask = jaxpar.data.pad_batch(batch, {wanted}) and mask the loss."
    )
