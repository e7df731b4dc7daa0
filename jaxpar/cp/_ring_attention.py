"""Attention over a sequence that the ranks of one mesh axis share: the public function and its checks."""

import difflib
import math

import jax
import jax.numpy as jnp

from jaxpar._errors import ParallelizeError
from jaxpar.cp._attend import attend
from jaxpar.cp._axis import num_ranks
from jaxpar.cp._order import check_two_chunks, padded_length
from jaxpar.cp._ring import Ring, Rotate
from jaxpar.cp._sequence import sequence_positions
from jaxpar.cp._visits import Schedule, choose_block

_ROTATES = ("allgather", "ppermute")
_PADDING = -1


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    axis: str,
    *,
    causal: bool = True,
    segment_ids: jax.Array | None = None,
    length: int | None = None,
    rotate: Rotate = "allgather",
    scale: float | None = None,
    load_balanced: bool = True,
    block_size: int = 512,
) -> jax.Array:
    """Exact attention where each rank of an axis holds a part of the sequence.

        before   device r: q, k, v of its T/c rows                         varying
        after    device r: its rows of softmax(scale q k^T) v              varying
        dual     the same ring once more; dk and dv travel home with it

    Moves, for N bytes of a rank's keys and values: c-1 hops of N (`ppermute`) or one all_gather of (c-1) N
    (`allgather`) forward; the same again in the backward, and c-1 hops of their gradients in float32. `ppermute` needs
    memory for two other ranks' keys and values, `allgather` for all. Scores are there one block at a time,
    f32[B, H, block_size, block_size], and nothing but q, k, v, the output and its log-sum-exp is kept for the
    backward. Softmax statistics and sums are float32 (float64 stays float64) whatever the dtype of the inputs.
    Causal with the head-tail layout of `split_sequence`, no rank computes what is wholly masked, and all do equal
    work. Outside shard_map or on an axis of size 1: the same blocks, all local.

    PyTorch: `context_parallel` and `set_rotate_method` (rows X1, X3, X4). Ring attention, arXiv 2310.01889.

    Args:
        q: f32[..., H, T/c, E], per device; any batch dims.
        k: f32[..., K, T/c, E]; query head h attends with key/value head h // (H / K), which is not repeated in memory.
        v: as `k`.
        axis: Mesh axis that shares the sequence.
        causal: A row sees keys at its own and earlier positions of the sequence only.
        segment_ids: i32[..., T/c], the document of each row: attention within equal ids only, also across ranks. Below
            zero is padding, which sees nothing and is not seen: its output and all its gradients are zero.
        length: Rows of the whole sequence before `split_sequence` padded it; what lies at or beyond it is padding.
            Not needed under a causal mask, where no real row sees the end.
        rotate: How keys and values get round: "allgather" at once, "ppermute" rank by rank. Equal in value.
        scale: Of the scores; 1 / sqrt(E) by default.
        load_balanced: Rows lie as `split_sequence` cuts them; False is the contiguous layout, exact too, but under a
            causal mask early ranks compute scores that are masked.
        block_size: Rows and keys of a block of scores. The nearest divisor of the rows of a chunk is taken, so a length
            with few divisors can mean larger blocks. Larger ones are fewer steps of a loop, for more memory.

    Returns:
        As `q`, in its dtype.

    Raises:
        ParallelizeError: Unknown axis or rotate, shapes, dtypes or head counts that do not fit, an odd number of rows
            in the head-tail layout, or a length that is not that of the padded sequence.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh, rows = init_device_mesh((2, 4), ("cp", "dp")).jax_mesh, P("dp", None, "cp", None)
        >>> f = jax.shard_map(lambda q, k, v: ring_attention(q, k, v, "cp"), mesh=mesh, in_specs=rows, out_specs=rows)
        >>> jax.jit(f)(jnp.ones((4, 6, 16, 8)), jnp.ones((4, 2, 16, 8)), jnp.ones((4, 2, 16, 8))).shape
        (4, 6, 16, 8)
    """
    ranks = num_ranks("ring_attention", axis)
    _check_options(rotate, block_size)
    _check_shapes(q, k, v, segment_ids)
    rows, balanced = q.shape[-2], load_balanced and ranks > 1
    if balanced:
        check_two_chunks("ring_attention", rows, axis, ranks)
    if length is not None:
        _check_length(length, rows, axis, ranks, load_balanced=load_balanced)
        segment_ids = _with_padding(segment_ids, length, axis, load_balanced=load_balanced)
    block = choose_block(rows // 2 if balanced and causal else rows, block_size)
    schedule = Schedule(ranks, rows // block, block, causal=causal, load_balanced=load_balanced)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    segments = None if segment_ids is None else segment_ids.astype(jnp.int32)
    return attend(Ring(axis, rotate, scale, schedule), q, k, v, segments)


def _with_padding(segments: jax.Array | None, length: int, axis: str, *, load_balanced: bool) -> jax.Array:
    """Segments in which every row at or beyond `length` is padding."""
    positions = sequence_positions(length, axis, load_balanced=load_balanced)
    return jnp.where(positions < length, 0 if segments is None else segments, _PADDING)


def _check_options(rotate: str, block_size: int) -> None:
    if rotate not in _ROTATES:
        near = difflib.get_close_matches(str(rotate), _ROTATES, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ParallelizeError(
            f"ring_attention: rotate={rotate!r} is unknown. Keys and values get round by 'allgather' or "
            f"'ppermute'.{hint}"
        )
    if block_size < 1:
        raise ParallelizeError(
            f"ring_attention: block_size={block_size} rows. A block of scores has at least one row; leave it out for "
            "512."
        )


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> None:
    shapes = f"q {q.dtype}{list(q.shape)}, k {k.dtype}{list(k.shape)}, v {v.dtype}{list(v.shape)}"
    if q.ndim < 3 or k.ndim != q.ndim or k.shape != v.shape:
        raise ParallelizeError(
            f"ring_attention: {shapes} do not fit. Per device q is [..., H, T/c, E], and k and v are [..., K, T/c, E], "
            "equal in shape. Move the head dim before the sequence dim: jnp.swapaxes(x, -3, -2)."
        )
    if q.shape[:-3] != k.shape[:-3] or q.shape[-2:] != k.shape[-2:]:
        raise ParallelizeError(
            f"ring_attention: {shapes} differ in batch dims {q.shape[:-3]} and {k.shape[:-3]}, rows {q.shape[-2]} and "
            f"{k.shape[-2]}, or features {q.shape[-1]} and {k.shape[-1]}. Every rank holds the same rows of all three."
        )
    if not k.shape[-3] or q.shape[-3] % k.shape[-3]:
        raise ParallelizeError(
            f"ring_attention: {q.shape[-3]} query heads do not divide among {k.shape[-3]} key/value heads. In "
            "grouped-query attention every key/value head serves the same number of query heads."
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ParallelizeError(
            f"ring_attention: {shapes} must share one floating dtype. Cast them first, as with q.astype(v.dtype)."
        )
    rows = (*q.shape[:-3], q.shape[-2])
    if segments is not None and (segments.shape != rows or not jnp.issubdtype(segments.dtype, jnp.integer)):
        raise ParallelizeError(
            f"ring_attention: segment_ids are {segments.dtype}{list(segments.shape)}, but q {list(q.shape)} needs an "
            f"integer for each row, int32{list(rows)}. Cut them with split_sequence, as the tokens."
        )


def _check_length(length: int, rows: int, axis: str, ranks: int, *, load_balanced: bool) -> None:
    padded = padded_length(length, ranks, load_balanced=load_balanced)
    if length < 1 or padded != ranks * rows:
        raise ParallelizeError(
            f"ring_attention: length={length} rows, padded to {padded}, are not the {ranks} x {rows} = {ranks * rows} "
            f"rows that the {ranks} ranks of axis {axis!r} hold. Give the length of the sequence before split_sequence."
        )
