"""Which leaves of a unit travel together: small ones in one flat buffer, large ones as they are.

    shards on device r    [norm 1/n] [bias 1/n] [kernel 1/n]
    wires                 [norm + bias, one flat buffer] [kernel, not copied]

A wire is one all-gather on the way in and one reduce-scatter on the way back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpar._module import varying_axes


@dataclass(frozen=True)
class Wire:
    """Leaves of one collective.

    Args:
        leaves: positions in the flattened tree.
        is_flat: they share one flat buffer; otherwise there is one leaf, sent along its own dim.
    """

    leaves: tuple[int, ...]
    is_flat: bool


def assign_wires(
    shards: Sequence[jax.Array], dims: Sequence[int | None], *, num_ranks: int, flatten_below_bytes: int
) -> tuple[Wire, ...]:
    """Returns the wires of a unit, in the order of their first leaf.

    Args:
        shards: this device's part of each leaf, in the dtype that travels.
        dims: dim along which each leaf is sharded; None: it is replicated and does not travel.
        num_ranks: number of parts.
        flatten_below_bytes: whole leaves smaller than this share a flat buffer with others of the same dtype (and
            of the same tensor-parallel axes).
    """
    alone: list[Wire] = []
    small: dict[tuple[str, frozenset[str]], list[int]] = {}
    for leaf, (x, dim) in enumerate(zip(shards, dims, strict=True)):
        if dim is None or not x.size:
            continue
        if num_ranks * x.size * x.dtype.itemsize < flatten_below_bytes:
            small.setdefault((str(x.dtype), varying_axes(x)), []).append(leaf)
        else:
            alone.append(Wire((leaf,), is_flat=False))
    shared = [Wire(tuple(leaves), is_flat=len(leaves) > 1) for leaves in small.values()]
    return tuple(sorted(alone + shared, key=lambda wire: wire.leaves[0]))


def pack_shards(shards: Sequence[jax.Array]) -> jax.Array:
    """[S]: this device's parts, one after the other."""
    return jnp.concatenate([x.reshape(-1) for x in shards])


def unpack_full(gathered: jax.Array, shards: Sequence[jax.Array], dims: Sequence[int]) -> list[jax.Array]:
    """From [n, S], everybody's parts, the whole leaves."""
    out, offset = [], 0
    for x, dim in zip(shards, dims, strict=True):
        parts = gathered[:, offset : offset + x.size].reshape(gathered.shape[0], *x.shape)
        whole = (*x.shape[:dim], gathered.shape[0] * x.shape[dim], *x.shape[dim + 1 :])
        out.append(jnp.moveaxis(parts, 0, dim).reshape(whole))
        offset += x.size
    return out


def pack_full(leaves: Sequence[jax.Array], dims: Sequence[int], num_ranks: int) -> jax.Array:
    """[n S]: of whole leaves, first the parts of rank 0, then those of rank 1, ...; the inverse of `unpack_full`."""
    rows = []
    for x, dim in zip(leaves, dims, strict=True):
        parts = x.reshape(*x.shape[:dim], num_ranks, x.shape[dim] // num_ranks, *x.shape[dim + 1 :])
        rows.append(jnp.moveaxis(parts, dim, 0).reshape(num_ranks, -1))
    return jnp.concatenate(rows, axis=1).reshape(-1)


def unpack_shards(buffer: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """From [S], this device's parts; the inverse of `pack_shards`."""
    out, offset = [], 0
    for shape in shapes:
        size = math.prod(shape)
        out.append(buffer[offset : offset + size].reshape(shape))
        offset += size
    return out
