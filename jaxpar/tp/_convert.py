"""From one placement of an activation to another, over one mesh axis, per device.

    from \\ to      Replicate                     Shard(d)
    Replicate      -                             slice
    Shard(s)       all-gather                    all-to-all
    Partial        all-reduce                    reduce-scatter

*Whole* is a value that every rank has and uses its own way (the input of a column-split layer): replicated by value,
but each rank's cotangent is a part of the sum. So its dual is an all-reduce (from Replicate) or a reduce-scatter (from
Shard), Megatron's f and g-bar (arXiv 1909.08053, 2205.05198).
"""

from typing import Any

import jax

from jaxpar._errors import ParallelizeError
from jaxpar._module import vary, varying_axes
from jaxpar.mesh import (
    Partial,
    Placement,
    Replicate,
    Shard,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from jaxpar.tp._shared import shared


def to_whole(x: jax.Array, source: Placement, axis: str, where: str) -> jax.Array:
    """The whole value, for layers that each use their own part of the weights.

    Replicate: nothing moves; backward all-reduce. Shard(d): all-gather; backward reduce-scatter.
    """
    if isinstance(source, Replicate):
        # What varies already was made whole further up (PrepareModuleInput).
        return x if axis in varying_axes(x) else shared(x, ("whole", axis), lambda x: vary(x, (axis,)))
    if isinstance(source, Shard):
        _check_varies(x, source, axis, where)
        dim = _dim(x, source, where)
        return shared(x, ("whole", axis, dim), lambda x: all_gather(x, axis, dim=dim))
    raise ParallelizeError(
        f"{where}: a layer cannot read terms of a sum (input Partial()). Let the layer before it reduce them: "
        f"RowwiseParallel(output_layouts=Replicate())."
    )


def convert(x: jax.Array, source: Placement, target: Placement, axis: str, where: str) -> jax.Array:
    """The same value, lying otherwise; Replicate means equal on all ranks, also by JAX's type.

    Raises:
        ParallelizeError: the type contradicts `source`, a dim does not divide, or a sum should become terms again.
    """
    if isinstance(source, Replicate):
        _check_equal(x, axis, where)
        if isinstance(target, Shard):
            return slice_of(x, _dim(x, target, where), axis, where)
    elif source == target:
        return x
    elif isinstance(source, Shard) and isinstance(target, Replicate):
        _check_varies(x, source, axis, where)
        return all_gather(x, axis, dim=_dim(x, source, where), invariant=True)
    elif isinstance(source, Shard) and isinstance(target, Shard):
        split, join = _dim(x, target, where), _dim(x, source, where)
        _check_divides(x, split, axis, where)
        return all_to_all(x, axis, split_dim=split, concat_dim=join)
    elif isinstance(target, Replicate):
        return all_reduce(x, axis)
    elif isinstance(target, Shard):
        dim = _dim(x, target, where)
        _check_divides(x, dim, axis, where)
        return reduce_scatter(x, axis, dim=dim)
    if isinstance(target, Partial):
        raise ParallelizeError(f"{where}: {source} cannot become terms of a sum ({target}).")
    return x


def slice_of(x: jax.Array, dim: int, axis: str, where: str) -> jax.Array:
    """This rank's part along `dim` of a value that all ranks have. Nothing moves; backward all-reduce."""
    _check_divides(x, dim, axis, where)
    size = x.shape[dim] // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(vary(x, (axis,)), jax.lax.axis_index(axis) * size, size, dim)


def _dim(x: jax.Array, placement: Shard, where: str) -> int:
    if not -x.ndim <= placement.dim < x.ndim:
        raise ParallelizeError(
            f"{where}: {placement!r} of an array with {x.ndim} dims, {x.dtype}{list(x.shape)}: there is no dim {placement.dim}."
        )
    return placement.dim % x.ndim


def _check_divides(x: jax.Array, dim: int, axis: str, where: str) -> None:
    size = jax.lax.axis_size(axis)
    if x.shape[dim] % size:
        padded = -(-x.shape[dim] // size) * size
        raise ParallelizeError(
            f"{where}: dim {dim} of {x.dtype}{list(x.shape)} does not divide into the {size} ranks of {axis!r}: {x.shape[dim]} % {size} "
            f"= {x.shape[dim] % size}. Pad it to {padded}."
        )


def _check_equal(x: jax.Array, axis: str, where: str) -> None:
    if axis in varying_axes(x):
        raise ParallelizeError(
            f"{where}: {x.dtype}{list(x.shape)} should be the same on all ranks of {axis!r} (Replicate()), but it comes from values "
            f"that differ between them: a layer before it left its output sharded or unsummed. Name its layout here, as in "
            f"input_layouts=Shard(-1), or let that layer end with output_layouts=Replicate()."
        )


def _check_varies(x: Any, source: Placement, axis: str, where: str) -> None:
    if axis not in varying_axes(x):
        raise ParallelizeError(
            f"{where}: {x.dtype}{list(x.shape)} should be this rank's part ({source!r}), but it is the same on all ranks of {axis!r}: "
            f"nobody has split it. Write input_layouts=Replicate()."
        )
