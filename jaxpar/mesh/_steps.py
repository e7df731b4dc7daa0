"""The steps of a redistribution plan, as each device runs them inside one `shard_map`.

    gather       [a] [b]       -> [a b] [a b]            split       [a b] [a b]  -> [a] [b]
    exchange     [a|b] [c|d]   -> [a/c] [b/d]            reduce      [a] [b]      -> [a+b] [a+b]
    reorder      whose piece is which                    reduce_scatter  [a|b] [c|d] -> [a+c] [b+d]

Where a dim does not divide, pieces are dealt out with padding before they travel and joined without it afterwards;
where it divides, dealing and joining are nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.mesh._chunks import deal_table, join_table
from jaxpar.mesh._layout import Layout
from jaxpar.mesh._plan import Extent, RedistributionStep


def run_steps(
    x: jax.Array, layout: Layout, steps: tuple[RedistributionStep, ...], extent: Extent
) -> jax.Array:
    """Run a plan on one device's part, in per-device code.

    Args:
        x: What one device holds under `layout`.
        layout: The layout before the first step.
        steps: The plan.
        extent: Array and mesh.
    """
    x = x.reshape(extent.local_shape(layout))
    for step in steps:
        x = _RUN[step.kind](x, layout, step, extent)
        layout = step.after
    return x.reshape((1,)) if layout.partial and not x.shape else x


def _gather(x: jax.Array, layout: Layout, step: RedistributionStep, extent: Extent) -> jax.Array:
    dim = _dim(step)
    whole = lax.all_gather(x, step.axes, axis=dim, tiled=True, to="invarying")
    return _join(whole, dim, step.after.dims[dim], step.axes, extent)


def _exchange(x: jax.Array, layout: Layout, step: RedistributionStep, extent: Extent) -> jax.Array:
    dim, to_dim = _dim(step), step.to_dim
    assert to_dim is not None
    dealt = _deal(x, to_dim, layout.dims[to_dim], step.axes, extent)
    moved = lax.all_to_all(dealt, step.axes, split_axis=to_dim, concat_axis=dim, tiled=True)
    return _join(moved, dim, step.after.dims[dim], step.axes, extent)


def _split(x: jax.Array, layout: Layout, step: RedistributionStep, extent: Extent) -> jax.Array:
    dim = _dim(step)
    dealt = _deal(x, dim, layout.dims[dim], step.axes, extent)
    length = step.local_shape[dim]
    return lax.dynamic_slice_in_dim(dealt, lax.axis_index(step.axes) * length, length, dim)


def _reorder(x: jax.Array, layout: Layout, step: RedistributionStep, extent: Extent) -> jax.Array:
    """Piece k of the old nesting goes to the device that has piece k in the new one."""
    old = step.axes
    new = step.after.dims[_dim(step)][-len(old) :]
    axes = tuple(axis for axis, _ in extent.sizes if axis in old)  # JAX wants mesh order here
    places = np.arange(extent.num_ranks(axes)).reshape(extent.parts(axes))

    def holders(nesting: tuple[str, ...]) -> list[int]:
        return places.transpose([axes.index(axis) for axis in nesting]).ravel().tolist()

    return lax.ppermute(x, axes, list(zip(holders(old), holders(new), strict=True)))


def _reduce(x: jax.Array, layout: Layout, step: RedistributionStep, extent: Extent) -> jax.Array:
    if step.op == "sum":
        return lax.psum(x, step.axes)
    if step.op == "avg":
        return lax.pmean(x, step.axes)
    if step.op == "max":
        return lax.pmax(x, step.axes)
    if step.op == "min":
        return lax.pmin(x, step.axes)
    return jnp.prod(lax.all_gather(x, step.axes, to="invarying"), axis=0, dtype=x.dtype)


def _reduce_scatter(x: jax.Array, layout: Layout, step: RedistributionStep, extent: Extent) -> jax.Array:
    dim = _dim(step)
    dealt = _deal(x, dim, layout.dims[dim], step.axes, extent)
    ranks = extent.num_ranks(step.axes)
    if step.op in ("sum", "avg"):
        total = lax.psum_scatter(dealt, step.axes, scatter_dimension=dim, tiled=True)
        return total if step.op == "sum" else total / ranks
    shape = (*dealt.shape[:dim], ranks, dealt.shape[dim] // ranks, *dealt.shape[dim + 1 :])
    terms = lax.all_to_all(dealt.reshape(shape), step.axes, split_axis=dim, concat_axis=dim, tiled=True)
    combine = {"max": jnp.max, "min": jnp.min, "product": jnp.prod}[step.op or ""]
    return combine(terms, axis=dim).astype(x.dtype)


def _make_partial(x: jax.Array, layout: Layout, step: RedistributionStep, extent: Extent) -> jax.Array:
    """Terms whose reduction is x: x itself on rank 0 and the neutral element elsewhere, or x on every rank."""
    index = lax.axis_index(step.axes)
    if step.dim is not None:  # a piece of a split dim becomes a term of a sum, with zeros around it
        ranks, length = extent.num_ranks(step.axes), x.shape[step.dim]
        copies = jnp.concatenate([x] * ranks, axis=step.dim)
        own = lax.broadcasted_iota(jnp.int32, copies.shape, step.dim) // length == index
        around = jnp.where(own, copies, jnp.zeros_like(copies))
        return _join(around, step.dim, step.after.dims[step.dim], step.axes, extent)
    if step.op in ("sum", "product"):
        return jnp.where(index == 0, x, jnp.full_like(x, 0 if step.op == "sum" else 1))
    return lax.pcast(x, step.axes, to="varying")


_RUN = {
    "gather": _gather,
    "exchange": _exchange,
    "split": _split,
    "reorder": _reorder,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "make_partial": _make_partial,
}


# Padding.


def take_rows(x: jax.Array, rows: jax.Array | np.ndarray, dim: int) -> jax.Array:
    """Rows of a dim in another order, zeros where the index is one past the end."""
    return jnp.take(x, rows, axis=dim, mode="fill", fill_value=0)


def _deal(
    x: jax.Array, dim: int, outer: tuple[str, ...], inner: tuple[str, ...], extent: Extent
) -> jax.Array:
    if extent.is_even(dim, (*outer, *inner)):
        return x
    table = deal_table(extent.shape[dim], extent.parts(outer), extent.parts(inner))
    return take_rows(x, _own_row(table, outer), dim)


def _join(
    x: jax.Array, dim: int, outer: tuple[str, ...], inner: tuple[str, ...], extent: Extent
) -> jax.Array:
    if extent.is_even(dim, (*outer, *inner)):
        return x
    table = join_table(extent.shape[dim], extent.parts(outer), extent.parts(inner))
    return take_rows(x, _own_row(table, outer), dim)


def _own_row(table: np.ndarray, outer: tuple[str, ...]) -> jax.Array | np.ndarray:
    """The table's row for this device's piece of the outer split."""
    return jnp.asarray(table)[lax.axis_index(outer)] if outer else table[0]


def _dim(step: RedistributionStep) -> int:
    assert step.dim is not None
    return step.dim
