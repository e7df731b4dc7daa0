"""The whole sequence on every rank, or each rank's rows of it: split, join, and where the rows belong.

    whole x  f32[B, T, D]   -- split_sequence -->   f32[B, T/c, D]   -- join_sequence -->   whole x

Rows lie as `_order.py` says.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar._errors import ParallelizeError
from jaxpar.cp._axis import num_ranks, rank_on
from jaxpar.cp._order import check_two_chunks, chunks_of, num_chunks, padded_length
from jaxpar.mesh import all_gather


def split_sequence(
    x: jax.Array, axis: str, *, dim: int = 1, load_balanced: bool = True, pad_value: float = 0
) -> jax.Array:
    """Take this rank's rows of a whole sequence.

        before   every device: x                          f32[B, T, ...]      equal over the axis
        after    device r: chunks r and 2c-1-r of x       f32[B, T/c, ...]    varying
        dual     each rank's cotangent in its rows, summed over the axis (an all_reduce; none for token ids)

    Nothing moves: the rest is dropped. A length that does not divide by 2c is padded at the end with `pad_value`;
    padded rows see real keys, no real row sees them under a causal mask, and `join_sequence(length=T)` drops them.
    Without a causal mask give the true length to `ring_attention(length=T)`. In a loss leave them out by
    `sequence_positions(T, axis) < T`. Identity outside shard_map or on an axis of size 1.

    PyTorch: entering `context_parallel(mesh, buffers=..., buffer_seq_dims=...)` (row X1).

    Args:
        x: The whole sequence, on every rank.
        axis: Mesh axis that shares the sequence.
        dim: Sequence dim.
        load_balanced: Head-tail layout; False is contiguous.
        pad_value: What padded rows hold.

    Raises:
        ParallelizeError: Unknown axis, or no such dim.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((2, 4), ("cp", "dp")).jax_mesh
        >>> f = lambda x: split_sequence(x, "cp", dim=0)
        >>> jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P("cp"))(jnp.arange(8)).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    ranks, dim = num_ranks("split_sequence", axis), _checked_dim("split_sequence", x, dim)
    if ranks == 1:
        return x
    length = x.shape[dim]
    padding = padded_length(length, ranks, load_balanced=load_balanced) - length
    if padding:
        widths = [(0, padding if d == dim else 0) for d in range(x.ndim)]
        x = jnp.pad(x, widths, constant_values=pad_value)
    rows = x.shape[dim] // num_chunks(ranks, load_balanced)
    chunks = chunks_of(rank_on(axis, ranks), ranks, load_balanced)
    return jnp.concatenate(
        [lax.dynamic_slice_in_dim(x, chunk * rows, rows, axis=dim) for chunk in chunks], axis=dim
    )


def join_sequence(
    x: jax.Array,
    axis: str,
    *,
    dim: int = 1,
    length: int | None = None,
    load_balanced: bool = True,
    invariant: bool = False,
) -> jax.Array:
    """Put the whole sequence together again, in its own order.

        before   device r: chunks r and 2c-1-r of x       f32[B, T/c, ...]    varying
        after    every device: x                          f32[B, T, ...]
        dual     reduce_scatter of the cotangents; a slice if `invariant`

    One all_gather over the axis, (c-1) N bytes per device, N those of its part. The inverse of `split_sequence`;
    identity outside shard_map or on an axis of size 1.

    PyTorch: `context_parallel_unshard` (row X2).

    Args:
        x: This rank's rows.
        axis: Mesh axis that shares the sequence.
        dim: Sequence dim.
        length: Rows of the whole sequence before padding; None keeps all rows.
        load_balanced: As in `split_sequence`.
        invariant: Type the result as equal on all ranks, so that the out_spec need not name the axis.

    Raises:
        ParallelizeError: Unknown axis, no such dim, an odd number of rows, or `length` is longer than the sequence.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.cp import head_tail_order
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((2, 4), ("cp", "dp")).jax_mesh
        >>> f = lambda x: join_sequence(x, "cp", dim=0, invariant=True)
        >>> jax.shard_map(f, mesh=mesh, in_specs=P("cp"), out_specs=P())(head_tail_order(8, 2)).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    ranks, dim = num_ranks("join_sequence", axis), _checked_dim("join_sequence", x, dim)
    if ranks > 1:
        if load_balanced:
            check_two_chunks("join_sequence", x.shape[dim], axis, ranks)
        x = all_gather(x, axis, dim=dim, invariant=invariant)
        x = _undo_head_tail(x, ranks, dim) if load_balanced else x
    if length is None:
        return x
    if length > x.shape[dim]:
        raise ParallelizeError(
            f"join_sequence: length={length}, but the {ranks} ranks of axis {axis!r} hold {x.shape[dim]} rows of dim "
            f"{dim} in all. Give the length of the sequence before split_sequence."
        )
    return lax.slice_in_dim(x, 0, length, axis=dim)


def sequence_positions(length: int, axis: str, *, load_balanced: bool = True) -> jax.Array:
    """The positions in the whole sequence of this rank's rows, for rotary embeddings, masks and losses.

    Nothing moves. Positions of padding are `length` and above. All positions in order outside shard_map or on an
    axis of size 1.

    Args:
        length: Rows of the whole sequence before padding.
        axis: Mesh axis that shares the sequence.
        load_balanced: As in `split_sequence`.

    Returns:
        i32[T/c], varying over the axis.

    Raises:
        ParallelizeError: Unknown axis.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((2, 4), ("cp", "dp")).jax_mesh
        >>> f = lambda: sequence_positions(7, "cp")
        >>> jax.shard_map(f, mesh=mesh, in_specs=(), out_specs=P("cp"))().tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    ranks = num_ranks("sequence_positions", axis)
    rows = padded_length(length, ranks, load_balanced=load_balanced) // num_chunks(ranks, load_balanced)
    chunks = chunks_of(rank_on(axis, ranks), ranks, load_balanced)
    return jnp.concatenate([chunk * rows + jnp.arange(rows, dtype=jnp.int32) for chunk in chunks])


def _undo_head_tail(x: jax.Array, ranks: int, dim: int) -> jax.Array:
    """Chunks as gathered, (head, tail) by rank: heads in order, then tails from the last rank to the first."""
    chunks = x.reshape(*x.shape[:dim], ranks, 2, x.shape[dim] // (2 * ranks), *x.shape[dim + 1 :])
    heads = lax.index_in_dim(chunks, 0, axis=dim + 1, keepdims=False)
    tails = lax.index_in_dim(chunks, 1, axis=dim + 1, keepdims=False)
    return jnp.concatenate([heads, lax.rev(tails, (dim,))], axis=dim).reshape(x.shape)


def _checked_dim(where: str, x: jax.Array, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ParallelizeError(
            f"{where}: dim={dim} is not a dim of an array of shape {x.shape}. Name the sequence dim, 1 in [B, T, ...]."
        )
    return dim % x.ndim
