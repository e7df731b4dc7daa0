"""How an array is read to the host, in pieces.

all here            device 0: [a] -copy-> host[0:2]    device 1: [b] -copy-> host[2:4]
over processes      [a] [b] -all-gather of a slice-> [a' b'] on every device -copy-> host, then the next slice
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar._named import splitting_axes
from jaxpar._spec import entries
from jaxpar.mesh._collectives_gather import all_gather
from jaxpar.mesh._stream import Piece, Reading


def read(x: jax.Array, *, budget_bytes: int, keep: bool) -> Reading:
    """How to read an array. One that lies on several processes is gathered: all of them must read it, in one order.

    Args:
        x: any array but keys.
        budget_bytes: a gathered piece is at most half of it, so that two can travel.
        keep: False takes part in the gathers only.
    """
    if not needs_gather(x):
        return _read_here(x) if keep else Reading((), lambda: None)
    return read_gathered(x, max(1, budget_bytes // 2), keep=keep)


def needs_gather(x: Any) -> bool:
    """Whether parts of the array are on other processes only."""
    return isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)


def _read_here(x: jax.Array) -> Reading:
    host = np.empty(x.shape, x.dtype)
    shards = {str(shard.index): shard for shard in x.addressable_shards}.values()

    def put(index: Any, part: jax.Array) -> None:
        host[index] = np.asarray(part)

    return Reading(
        [
            Piece(s.data.nbytes, functools.partial(_copy_to_host, s.data), functools.partial(put, s.index))
            for s in shards
        ],
        lambda: host,
    )


def _copy_to_host(x: jax.Array) -> jax.Array:
    """Begins the copy, for a handle of its own: JAX keeps a host copy with the handle, and the model keeps `x`."""
    handle = jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x])
    handle.copy_to_host_async()
    return handle


def read_gathered(x: jax.Array, budget_bytes: int, *, keep: bool) -> Reading:
    """Slices of all parts, each gathered to every device and copied from one; at most `budget_bytes` or one element each."""
    sharding = x.sharding
    assert isinstance(sharding, NamedSharding), f"an array over several processes without a mesh: {sharding}"
    blocks = block_indices(x.shape, sharding)
    size = math.prod(sharding.shard_shape(x.shape))
    length = min(size, max(1, budget_bytes // (len(blocks) * x.dtype.itemsize)))
    gather = gather_slice(sharding, len(x.shape), length)
    parts = np.empty((len(blocks), size) if keep else (0, 0), x.dtype)
    on_device = functools.cache(lambda: _to_device_memory(x))  # at the first piece, not before

    def put(start: int, gathered: jax.Array) -> None:
        if keep:
            parts[:, start : start + length] = np.asarray(gathered.addressable_shards[0].data)
        else:
            jax.block_until_ready(gathered)

    def result() -> np.ndarray | None:
        return _joined(parts, x.shape, blocks) if keep else None

    starts = [min(start, size - length) for start in range(0, max(size, 1), max(length, 1))]
    return Reading(
        (
            Piece(
                len(blocks) * length * x.dtype.itemsize,
                lambda at=at: gather(on_device(), at),
                functools.partial(put, at),
            )
            for at in starts
        ),
        result,
    )


def block_indices(shape: Sequence[int], sharding: NamedSharding) -> list[tuple[slice, ...]]:
    """Which part of the array each rank of the sharding's axes (in mesh order) has."""
    axes, dims = splitting_axes(sharding), entries(sharding.spec, len(shape))
    sizes = [sharding.mesh.shape[axis] for axis in axes]
    local = sharding.shard_shape(tuple(shape))
    blocks = []
    for place in np.ndindex(*sizes):
        rank_on = dict(zip(axes, place, strict=True))
        index = []
        for dim, names in enumerate(dims):
            block = functools.reduce(
                lambda at, axis: at * sharding.mesh.shape[axis] + rank_on[axis], names, 0
            )
            index.append(slice(block * local[dim], (block + 1) * local[dim]))
        blocks.append(tuple(index))
    return blocks


def _joined(parts: np.ndarray, shape: Sequence[int], blocks: list[tuple[slice, ...]]) -> np.ndarray:
    host = np.empty(shape, parts.dtype)
    for part, index in zip(parts, blocks, strict=True):
        host[index] = part.reshape(host[index].shape)
    return host


@functools.lru_cache(maxsize=1024)
def gather_slice(sharding: NamedSharding, ndim: int, length: int) -> Callable[[jax.Array, int], jax.Array]:
    """A program: elements [start, start + length) of every device's part, [ranks, length], on every device."""
    axes = splitting_axes(sharding)

    def body(part: jax.Array, start: jax.Array) -> jax.Array:
        piece = jax.lax.dynamic_slice_in_dim(part.reshape(-1), start, length)
        return all_gather(piece, axes, tiled=False, invariant=True)

    mesh: jax.sharding.Mesh = sharding.mesh  # pyright: ignore[reportAssignmentType]
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(sharding.spec, PartitionSpec()), out_specs=PartitionSpec())
    )


def _to_device_memory(x: jax.Array) -> jax.Array:
    """Each device's part in its own memory, if it was offloaded to the host."""
    default = next(iter(x.sharding.device_set)).default_memory().kind
    return x if x.sharding.memory_kind == default else jax.device_put(x, x.sharding.with_memory_kind(default))
