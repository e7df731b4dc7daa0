"""The split layers as pure functions on arrays, for Linen, Equinox and plain dicts; inside `jax.shard_map`.

column_linear    y[:, part r] = x @ W[:, part r] + b[part r]          forward -            backward all-reduce of x's
row_linear       y = sum over r of x[:, part r] @ W[part r] + b       forward all-reduce   backward -
vocab_embedding  y = sum over r of (row of id if rank r holds it)     forward all-reduce   backward -
"""

import jax
import jax.numpy as jnp

from jaxpar.mesh import Partial, Placement, Replicate, Shard
from jaxpar.mesh._collectives_axes import manual_axes
from jaxpar.tp._convert import convert, to_whole


def column_linear(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    axis: str,
    input_layouts: Placement = Replicate(),
    output_layouts: Placement = Shard(-1),
) -> jax.Array:
    """A linear layer split by its outputs.

        input Replicate: forward nothing, backward one all-reduce of the input's gradient
        input Shard(d):  forward all-gather along d, backward reduce-scatter

    Args:
        x: f32[..., D], equal on all ranks or this rank's part.
        kernel: f32[D, F/n], this rank's columns.
        bias: f32[F/n], or None.
        axis: mesh axis.
        input_layouts: how x lies.
        output_layouts: how the output is to lie; `Shard(-1)`: as computed, f32[..., F/n].

    Raises:
        CollectiveError: outside shard_map.
        ParallelizeError: a layout that the values contradict, or a dim that does not divide.

    Source: Megatron-LM (arXiv 1909.08053), PyTorch row T2.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> from jaxpar.tp import column_linear
        >>> mesh = init_device_mesh((8,), ("tp",)).jax_mesh
        >>> f = lambda x, w: column_linear(x, w, axis="tp")
        >>> jax.shard_map(f, mesh=mesh, in_specs=(P(), P(None, "tp")), out_specs=P(None, "tp"))(
        ...     jnp.ones((2, 4)), jnp.ones((4, 16))).shape
        (2, 16)
    """
    manual_axes("column_linear", axis)
    whole = to_whole(x, input_layouts, axis, "column_linear")
    y = whole @ kernel if bias is None else whole @ kernel + bias
    return convert(y, Shard(-1), output_layouts, axis, "column_linear")


def row_linear(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    axis: str,
    input_layouts: Placement = Shard(-1),
    output_layouts: Placement = Replicate(),
) -> jax.Array:
    """A linear layer split by its inputs; the bias is added once, after the sum.

        output Replicate: forward all-reduce, backward nothing
        output Shard(d):  forward reduce-scatter along d, backward all-gather

    Args:
        x: f32[..., F/n], this rank's part.
        kernel: f32[F/n, D], this rank's rows.
        bias: f32[D], or None.
        axis: mesh axis.
        input_layouts: how x lies.
        output_layouts: how the output is to lie.

    Raises:
        CollectiveError: outside shard_map.
        ParallelizeError: a layout that the values contradict, or a dim that does not divide.

    Source: Megatron-LM (arXiv 1909.08053), PyTorch row T3.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> from jaxpar.tp import row_linear
        >>> mesh = init_device_mesh((8,), ("tp",)).jax_mesh
        >>> f = lambda x, w, b: row_linear(x, w, b, axis="tp")
        >>> jax.shard_map(f, mesh=mesh, in_specs=(P(None, "tp"), P("tp"), P()), out_specs=P())(
        ...     jnp.ones((1, 16)), jnp.ones((16, 1)), jnp.full(1, 100.0))
        Array([[116.]], dtype=float32)
    """
    manual_axes("row_linear", axis)
    mine = convert(x, input_layouts, Shard(-1), axis, "row_linear")
    y = convert(mine @ kernel, Partial(), output_layouts, axis, "row_linear")
    return y if bias is None else y + bias


def vocab_embedding(
    ids: jax.Array, table: jax.Array, *, axis: str, output_layouts: Placement = Replicate()
) -> jax.Array:
    """Rows of a table that is split by rows: each rank looks up the ids that it holds, and the sum is the row.

        output Replicate: forward all-reduce, backward nothing
        output Shard(d):  forward reduce-scatter along d, backward all-gather

    Args:
        ids: i32[...], equal on all ranks; an id outside the table gives zeros.
        table: f32[V/n, D], this rank's rows.
        axis: mesh axis.
        output_layouts: how the rows are to lie.

    Returns:
        f32[..., D].

    Raises:
        CollectiveError: outside shard_map.
        ParallelizeError: a dim that does not divide.

    Source: Megatron-LM (arXiv 1909.08053), PyTorch row T3 on `nn.Embedding`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> from jaxpar.tp import vocab_embedding
        >>> mesh = init_device_mesh((8,), ("tp",)).jax_mesh
        >>> f = lambda ids, table: vocab_embedding(ids, table, axis="tp")
        >>> jax.shard_map(f, mesh=mesh, in_specs=(P(), P("tp")), out_specs=P())(
        ...     jnp.array([0, 9]), jnp.arange(16.0)[:, None])
        Array([[0.],
               [9.]], dtype=float32)
    """
    manual_axes("vocab_embedding", axis)
    ids = to_whole(ids, Replicate(), axis, "vocab_embedding")
    local, is_mine = own_rows(ids, table.shape[0], axis)
    return convert(only(is_mine, table[local]), Partial(), output_layouts, axis, "vocab_embedding")


def own_rows(ids: jax.Array, num_rows: int, axis: str) -> tuple[jax.Array, jax.Array]:
    """Where the ids lie in this rank's rows (0 for those of others), and whether they do."""
    row = ids.astype(jnp.int32) - jax.lax.axis_index(axis) * num_rows
    is_mine = (row >= 0) & (row < num_rows)
    return jnp.where(is_mine, row, 0), is_mine


def only(is_mine: jax.Array, found: jax.Array) -> jax.Array:
    """Zeros in place of the rows of others."""
    return jnp.where(is_mine[..., None], found, jnp.zeros_like(found))
