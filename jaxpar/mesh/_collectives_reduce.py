"""Collectives that combine values: all_reduce, reduce, reduce_scatter.

Gradients, for PyTorch users. Values in `shard_map` have a type: *varying* (each device its own) or *invariant* over
an axis (equal on all). `jax.grad` of an invariant loss counts that loss once; of a varying loss it differentiates
the sum over the devices. So `all_reduce`, whose result is invariant, has the identity as its dual, where PyTorch
has a second all_reduce: there each rank seeds the same loss once more, and the gradient is n times as large.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar._errors import CollectiveError
from jaxpar._pytree import PyTree, leaf_name
from jaxpar.mesh._axes import AxisNames
from jaxpar.mesh._collectives_axes import (
    ManualAxes,
    check_dim,
    check_divisible,
    check_op,
    check_root,
    equal_over_unit,
    manual_axes,
    only_on,
    to_varying,
)

ReduceOp = Literal["sum", "mean", "max", "min", "prod"]
_OPS = ("sum", "mean", "max", "min", "prod")


def all_reduce(x: PyTree, axis: AxisNames, op: ReduceOp = "sum") -> PyTree:
    """Combine the blocks of all devices of an axis; every device gets the result.

        before   device i: x_i                    varying
        after    device i: x_0 + ... + x_{n-1}    invariant: the out_spec need not name the axis
        dual     device i gets the cotangent itself (sum), divided by n (mean); no communication

    PyTorch: `all_reduce` (C20, C29). A ring sends 2 (n-1)/n N bytes per device. `max` and `min`: the cotangent is
    shared equally among the devices that hold the extreme value; differentiating them adds one all_reduce that
    counts the ties. `prod` gathers all blocks, (n-1) N bytes, so that zeros are differentiated right.

    Args:
        x: Array or pytree; one device's block, `f32[...]`, the same shape on all.
        axis: Mesh axis, or several.
        op: sum, mean, max, min or prod.

    Returns:
        Same shapes; invariant over the axis.

    Raises:
        CollectiveError: Outside shard_map, unknown axis or op, or max/min of complex numbers, which have no order.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((4, 2), ("dp", "tp")).jax_mesh
        >>> f = lambda x: all_reduce(x, "dp")
        >>> jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P())(jnp.arange(4.0))
        Array([6.], dtype=float32)
    """
    axes = manual_axes("all_reduce", axis)
    check_op("all_reduce", op, _OPS)
    return jax.tree.map(lambda leaf: _all_reduce(jnp.asarray(leaf), axes, op), x)


def reduce(x: PyTree, axis: AxisNames, *, root: int = 0, op: ReduceOp = "sum") -> PyTree:
    """Combine the blocks of all devices of an axis; the root gets the result, the others zeros.

        before   device i: x_i                                          varying
        after    root: x_0 + ... + x_{n-1}    others: 0                 varying
        dual     every device gets the root's cotangent (a broadcast)

    PyTorch: `reduce` (C24), where the other ranks' result is undefined. XLA has no rooted reduction: this is an
    all_reduce, 2 (n-1)/n N bytes per device. Prefer `all_reduce`, which costs the same.

    Args:
        x: Array or pytree; one device's block.
        axis: Mesh axis, or several.
        root: Position on the axis (row-major over several) that gets the result.
        op: sum, mean, max, min or prod.

    Raises:
        CollectiveError: As `all_reduce`, or the root is not on the axis.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((4, 2), ("dp", "tp")).jax_mesh
        >>> f = lambda x: reduce(x, "dp", root=1)
        >>> jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(jnp.arange(4.0))
        Array([0., 6., 0., 0.], dtype=float32)
    """
    axes = manual_axes("reduce", axis)
    check_op("reduce", op, _OPS)
    check_root("reduce", root, axes)
    return jax.tree.map(lambda leaf: only_on(root, _all_reduce(jnp.asarray(leaf), axes, op), axes), x)


def reduce_scatter(x: PyTree, axis: AxisNames, *, dim: int = 0, op: Literal["sum", "mean"] = "sum") -> PyTree:
    """Combine the blocks of all devices of an axis; each device gets its part of the result.

        before   device i: x_i                     f32[D0, ...]      varying
        after    device i: part i of sum_j x_j     f32[D0 / n, ...]  varying
        dual     all_gather of the cotangents along the same dim (divided by n for mean)

    PyTorch: `reduce_scatter_single` (C22, C28). A ring sends (n-1)/n N bytes per device.

    Args:
        x: Array or pytree; one device's block.
        axis: Mesh axis, or several (parts in row-major order).
        dim: Dim that is scattered; its size must divide by the number of devices.
        op: sum or mean.

    Raises:
        CollectiveError: Outside shard_map, unknown axis or op, no such dim, or it does not divide.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
        >>> f = lambda x: reduce_scatter(x, "dp")
        >>> jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P("dp"))(jnp.arange(4.0))
        Array([0., 2., 4., 6.], dtype=float32)
    """
    axes = manual_axes("reduce_scatter", axis)
    check_op("reduce_scatter", op, ("sum", "mean"))

    def scatter(path: tuple[object, ...], leaf: jax.Array) -> jax.Array:
        name, leaf = leaf_name(path) or "x", to_varying(jnp.asarray(leaf), axes.names)
        at = check_dim("reduce_scatter", name, dim, leaf.ndim)
        check_divisible("reduce_scatter", name, leaf, at, axes)
        return (
            _mean_of_sum(sum_scatter(leaf, axes, at), axes) if op == "mean" else sum_scatter(leaf, axes, at)
        )

    return jax.tree_util.tree_map_with_path(scatter, x)


def sum_scatter(x: jax.Array, axes: ManualAxes, dim: int) -> jax.Array:
    """The summed part of this device; `x` itself on axes of size 1."""
    return lax.psum_scatter(x, axes.wide, scatter_dimension=dim, tiled=True) if axes.wide else x


def _all_reduce(x: jax.Array, axes: ManualAxes, op: str) -> jax.Array:
    if op in ("max", "min") and jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise CollectiveError(
            f"all_reduce: op {op!r} of {x.dtype}: complex numbers have no order. Reduce jnp.abs(x) or real and "
            "imaginary parts."
        )
    x = equal_over_unit(to_varying(x, axes.names), axes)
    if not axes.wide:
        return x
    if op in ("max", "min"):
        return _extreme(x, axes.wide, op)
    if op == "prod":
        return jnp.prod(lax.all_gather(x, axes.wide, to="invarying"), axis=0)
    total = lax.psum(x, axes.wide)
    return _mean_of_sum(total, axes) if op == "mean" else total


def _mean_of_sum(total: jax.Array, axes: ManualAxes) -> jax.Array:
    return total / axes.num_ranks if axes.num_ranks > 1 else total


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extreme(x: jax.Array, names: tuple[str, ...], op: str) -> jax.Array:
    """Largest or smallest value over the axes; JAX has no derivative for `pmax`."""
    return lax.pmax(x, names) if op == "max" else lax.pmin(x, names)


@_extreme.defjvp
def _extreme_jvp(
    names: tuple[str, ...], op: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    y = _extreme(x, names, op)
    holds = (x == y).astype(dx.dtype)
    return y, lax.psum(dx * holds / lax.psum(holds, names), names)
