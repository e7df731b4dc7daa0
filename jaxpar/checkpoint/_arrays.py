"""Between what a variable stores and what a checkpoint holds: the model's own shapes, whatever the layout.

variable                                  in the checkpoint
blocks.0.kernel   f32[D, F] P("dp")       f32[D, F], each device's part written by it
odd               f32[16] for f32[5, 3]   f32[5, 3]: padding depends on the number of devices
rngs.key          a random key            u32[2] and the name of its kind
count             a Python number         int64[]
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar._as_stored import as_stored, key_impl
from jaxpar._flat import flatten_and_pad, unflatten
from jaxpar._named import NamedArray
from jaxpar._record import is_flat

Leaves = list[Any]


def to_save(arrays: Sequence[NamedArray]) -> dict[str, Any]:
    """What Orbax shall write, by name. Arrays that are padded are made whole on every device of theirs, for the time of the save.

    All processes call it together, with the same arrays.
    """
    found = {array.name: _plain(array) for array in arrays}
    for mesh, flat in _by_mesh(
        [array for array in arrays if _is_on_mesh(array) and is_flat(array.variable)]
    ).items():
        whole = NamedSharding(mesh, PartitionSpec())
        shapes = tuple(array.shape for array in flat)
        values = [array.value for array in flat]
        if whole.addressable_devices:
            values = _unflattening(shapes, whole)(values)
        else:
            values = [_nowhere(array, whole) for array in flat]
        found |= {array.name: x for array, x in zip(flat, values, strict=True)}
    return found


def to_restore(array: NamedArray) -> Any:
    """How Orbax shall read an array: into its place if it has one on a mesh, else as a host array."""
    if not _is_on_mesh(array):
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=array.dtype)
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array, dtype=array.dtype, sharding=_place(array), global_shape=array.shape
    )


def restored(arrays: Sequence[NamedArray], values: Sequence[Any]) -> Leaves:
    """What Orbax has read, as the variables store it."""
    out = list(map(_stored, arrays, values))
    flat = [i for i, array in enumerate(arrays) if _is_on_mesh(array) and is_flat(array.variable)]
    for i in flat:
        value = arrays[i].value
        if value.sharding.addressable_devices:
            out[i] = _flattening(value.shape[0], _on_device(value.sharding))(values[i])
        else:
            out[i] = jax.make_array_from_single_device_arrays(
                value.shape, value.sharding, [], dtype=value.dtype
            )
    return [_in_memory(array, x) for array, x in zip(arrays, out, strict=True)]


def is_abstract_without_place(array: NamedArray) -> bool:
    """Whether an array has neither values nor a sharding that says where they would go."""
    return isinstance(array.value, jax.ShapeDtypeStruct) and not _is_on_mesh(array)


def key_kind(array: NamedArray) -> str | None:
    """The kind of random keys, if the array holds such."""
    return str(key_impl(array.value)) if array.is_key else None


def spec_text(array: NamedArray) -> str:
    """How an array lay when it was saved, for people who look at the checkpoint."""
    return f"P({', '.join(map(repr, array.value.sharding.spec))})" if _is_on_mesh(array) else "host"


def _plain(array: NamedArray) -> Any:
    x = array.value
    if not _is_on_mesh(array):
        return np.asarray(jax.random.key_data(x) if array.is_key else x)
    if array.is_key:
        place = _place(array)
        return jax.random.key_data(x) if place.addressable_devices else _nowhere(array, place)
    return x


def _stored(array: NamedArray, value: Any) -> Any:
    if not _is_on_mesh(array):
        return as_stored(array, np.asarray(value))
    if not array.is_key:
        return value
    if value.sharding.addressable_devices:
        return jax.random.wrap_key_data(value, impl=key_impl(array.value))
    old = array.value
    return jax.make_array_from_single_device_arrays(old.shape, old.sharding, [], dtype=old.dtype)


def _is_on_mesh(array: NamedArray) -> bool:
    return isinstance(getattr(array.value, "sharding", None), NamedSharding)


def _place(array: NamedArray) -> NamedSharding:
    """Where the array lies in the shape that the checkpoint has."""
    sharding = array.value.sharding
    if is_flat(array.variable):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return _on_device(sharding)


def _on_device(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, sharding.spec)


def _in_memory(array: NamedArray, x: Any) -> Any:
    """In the memory where the variable keeps it: the host's, if it is offloaded."""
    old = getattr(array.value, "sharding", None)
    if not isinstance(old, NamedSharding) or x.sharding == old or not x.sharding.addressable_devices:
        return x
    return jax.device_put(x, old)


def _by_mesh(arrays: Sequence[NamedArray]) -> dict[jax.sharding.Mesh, list[NamedArray]]:
    found: dict[jax.sharding.Mesh, list[NamedArray]] = {}
    for array in arrays:
        found.setdefault(array.value.sharding.mesh, []).append(array)
    return found


@functools.cache
def _unflattening(shapes: tuple[tuple[int, ...], ...], whole: NamedSharding) -> jax.stages.Wrapped:
    """The program that makes padded arrays whole: one for all saves."""
    return jax.jit(functools.partial(_unflatten, shapes), out_shardings=whole)


@functools.cache
def _flattening(length: int, sharding: NamedSharding) -> jax.stages.Wrapped:
    """The program that pads an array: one for all of a length and layout."""
    return jax.jit(functools.partial(flatten_and_pad, length=length), out_shardings=sharding)


def _unflatten(shapes: Sequence[tuple[int, ...]], values: Leaves) -> Leaves:
    return [unflatten(x, shape) for x, shape in zip(values, shapes, strict=True)]


def _nowhere(array: NamedArray, sharding: NamedSharding) -> jax.Array:
    """An array of other processes, in the shape that the checkpoint has."""
    return jax.make_array_from_single_device_arrays(array.shape, sharding, [], dtype=jnp.dtype(array.dtype))
