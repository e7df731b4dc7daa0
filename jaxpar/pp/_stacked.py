"""Arrays that differ from device to device, on their way between programs.

    inside jax.shard_map    f32[...] that varies over {dp, tp}
    between programs        f32[dp * tp, ...], dim 0 split over (dp, tp): each device holds its own

What a stage hands on needs no other description than the type that JAX gives it.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpar import _compat


def spec(type_: Any, axis_names: tuple[str, ...]) -> PartitionSpec:
    """How `stack` lays out a value of this type."""
    return PartitionSpec(axes(type_, axis_names) or None)


def axes(type_: Any, axis_names: tuple[str, ...]) -> tuple[str, ...]:
    """The axes over which a value of this type varies, in the order of the mesh."""
    return tuple(axis for axis in axis_names if axis in _compat.varying_axes(type_))


def stack(x: jax.Array) -> jax.Array:
    """A value of this device as its part of the array between programs."""
    return x[None]


def unstack(x: jax.Array) -> jax.Array:
    """The value of this device."""
    return x[0]
