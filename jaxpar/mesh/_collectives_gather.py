"""Collectives that copy blocks: all_gather, gather, scatter, broadcast."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar._pytree import PyTree, leaf_name
from jaxpar.mesh._axes import AxisNames
from jaxpar.mesh._collectives_axes import (
    ManualAxes,
    check_dim,
    check_divisible,
    check_root,
    equal_over_unit,
    manual_axes,
    only_on,
    sum_over,
    to_varying,
)
from jaxpar.mesh._collectives_reduce import sum_scatter


def all_gather(
    x: PyTree, axis: AxisNames, *, dim: int = 0, tiled: bool = True, invariant: bool = False
) -> PyTree:
    """Put the blocks of all devices of an axis together; every device gets the whole.

        before   device i: x_i                      f32[D0, ...]      varying
        after    device i: [x_0, ..., x_{n-1}]      f32[n D0, ...]    varying, though equal on all
        dual     reduce_scatter (sum) of the cotangents along the same dim

    PyTorch: `all_gather_single` (C21, C28, C29). A ring sends (n-1) N bytes per device, N those of a block.

    Args:
        x: Array or pytree; one device's block.
        axis: Mesh axis, or several (blocks in row-major order).
        dim: Dim along which blocks are joined.
        tiled: Join along an existing dim; False stacks along a new one.
        invariant: Type the result as equal on all devices, so that the out_spec need not name the axis. Then its
            cotangent is equal too, and the dual is a slice without communication.

    Raises:
        CollectiveError: Outside shard_map, unknown axis, or no such dim.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((4, 2), ("dp", "tp")).jax_mesh
        >>> f = lambda x: all_gather(x, "dp", invariant=True)
        >>> jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P())(jnp.arange(4.0))
        Array([0., 1., 2., 3.], dtype=float32)
    """
    axes = manual_axes("all_gather", axis)

    def join(path: tuple[object, ...], leaf: jax.Array) -> jax.Array:
        leaf = jnp.asarray(leaf)
        at = check_dim("all_gather", leaf_name(path) or "x", dim, leaf.ndim + (not tiled))
        return _gathered(leaf, axes, at, tiled=tiled, invariant=invariant)

    return jax.tree_util.tree_map_with_path(join, x)


def gather(x: PyTree, axis: AxisNames, *, root: int = 0, dim: int = 0) -> PyTree:
    """Put the blocks of all devices of an axis together on the root; the others get zeros.

        before   device i: x_i                                 f32[D0, ...]      varying
        after    root: [x_0, ..., x_{n-1}]    others: 0        f32[n D0, ...]    varying
        dual     scatter of the root's cotangent

    PyTorch: `gather` (C24), where the other ranks get nothing. XLA has no rooted gather: this is an all_gather,
    (n-1) N bytes per device. Prefer `all_gather`, which costs the same.

    Args:
        x: Array or pytree; one device's block.
        axis: Mesh axis, or several.
        root: Position on the axis (row-major over several) that gets the whole.
        dim: Dim along which blocks are joined.

    Raises:
        CollectiveError: Outside shard_map, unknown axis, no such dim, or the root is not on the axis.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((4, 2), ("dp", "tp")).jax_mesh
        >>> f = lambda x: gather(x, "dp", root=1)
        >>> jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(jnp.arange(4.0))
        Array([0., 0., 0., 0., 0., 1., 2., 3., 0., 0., 0., 0., 0., 0., 0., 0.],      dtype=float32)
    """
    axes = manual_axes("gather", axis)
    check_root("gather", root, axes)

    def join(path: tuple[object, ...], leaf: jax.Array) -> jax.Array:
        leaf = jnp.asarray(leaf)
        at = check_dim("gather", leaf_name(path) or "x", dim, leaf.ndim)
        return only_on(root, _gathered(leaf, axes, at, tiled=True, invariant=False), axes)

    return jax.tree_util.tree_map_with_path(join, x)


def scatter(x: PyTree, axis: AxisNames, *, root: int = 0, dim: int = 0) -> PyTree:
    """Cut the root's block into parts, one for each device of an axis; other devices' blocks are not read.

        before   root: [p_0, ..., p_{n-1}]    others: anything    f32[D0, ...]        varying
        after    device i: p_i                                    f32[D0 / n, ...]    varying
        dual     gather of the cotangents to the root

    PyTorch: `scatter` (C24). It runs as a reduce_scatter of the root's block and zeros, (n-1)/n N bytes per device.

    Args:
        x: Array or pytree; one device's block, the same shape on all.
        axis: Mesh axis, or several (parts in row-major order).
        root: Position on the axis whose block is cut.
        dim: Dim that is cut; its size must divide by the number of devices.

    Raises:
        CollectiveError: Outside shard_map, unknown axis, no such dim, it does not divide, or the root is not on
            the axis.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((4, 2), ("dp", "tp")).jax_mesh
        >>> f = lambda x: scatter(x, "dp", root=1)
        >>> jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(jnp.arange(16.0))
        Array([4., 5., 6., 7.], dtype=float32)
    """
    axes = manual_axes("scatter", axis)
    check_root("scatter", root, axes)

    def cut(path: tuple[object, ...], leaf: jax.Array) -> jax.Array:
        name, leaf = leaf_name(path) or "x", jnp.asarray(leaf)
        at = check_dim("scatter", name, dim, leaf.ndim)
        check_divisible("scatter", name, leaf, at, axes)
        wire = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
        part = sum_scatter(to_varying(only_on(root, wire, axes), axes.names), axes, at)
        return part.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(cut, x)


def broadcast(x: PyTree, axis: AxisNames, *, root: int = 0) -> PyTree:
    """Give every device of an axis the root's block; other devices' blocks are not read.

        before   device i: x_i          varying
        after    device i: x_root       invariant: the out_spec need not name the axis
        dual     the root gets the cotangent, the others zeros; no communication

    PyTorch: `broadcast` (C24, C28; without a gradient there). It runs as an all_reduce of the root's block and
    zeros, 2 (n-1)/n N bytes per device: the cheapest form whose result JAX can type as equal on all devices. (An
    all_gather and an index would send (n-1) N; a tree of permutes N log n, typed as varying.) Values are exact,
    NaN and infinity included; only a negative zero comes out positive.

    Args:
        x: Array or pytree; one device's block, the same shape on all.
        axis: Mesh axis, or several.
        root: Position on the axis (row-major over several) whose block is sent.

    Raises:
        CollectiveError: Outside shard_map, unknown axis, or the root is not on the axis.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((4, 2), ("dp", "tp")).jax_mesh
        >>> f = lambda x: broadcast(x, "dp", root=2)
        >>> jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P())(jnp.arange(4.0))
        Array([2.], dtype=float32)
    """
    axes = manual_axes("broadcast", axis)
    check_root("broadcast", root, axes)
    return jax.tree.map(lambda leaf: sum_over(only_on(root, jnp.asarray(leaf), axes), axes), x)


def _gathered(x: jax.Array, axes: ManualAxes, dim: int, *, tiled: bool, invariant: bool) -> jax.Array:
    x = to_varying(x, axes.names)
    x = equal_over_unit(x, axes) if invariant else x
    if not axes.wide:
        return x if tiled else jnp.expand_dims(x, dim)
    return lax.all_gather(x, axes.wide, axis=dim, tiled=tiled, to="invarying" if invariant else "varying")
