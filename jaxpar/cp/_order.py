"""Which rows of a sequence lie on which rank: the arithmetic, and the permutation for data loaders.

Under a causal mask late rows see more keys than early ones. Cut into 2c chunks, rank r holds chunk r and chunk
2c-1-r, one from the head and one from the tail, so that all ranks see the same number of keys. For c = 2:

    sequence            0 | 1 | 2 | 3
    rank 0, rank 1      0   3 | 1   2          head_tail_order(4, 2) = [0, 3, 1, 2]

`load_balanced=False` is the contiguous layout: rank r holds chunk r of c. A length that does not divide is padded at
the end of the sequence, so padding lies behind every real row. On one rank nothing is cut, whatever the layout.
"""

import jax
import numpy as np

from jaxpar._errors import ParallelizeError


def padded_length(length: int, ranks: int, *, load_balanced: bool = True) -> int:
    """Rows of the whole sequence after padding: a multiple of 2c (contiguous: of c); unpadded on one rank.

    Args:
        length: Rows of the whole sequence, T.
        ranks: Ranks of the axis, c.
        load_balanced: Head-tail layout.

    Example:
        >>> padded_length(13, 4), padded_length(13, 4, load_balanced=False), padded_length(13, 1)
        (16, 16, 13)
    """
    multiple = num_chunks(ranks, load_balanced)
    return -(-length // multiple) * multiple


def head_tail_order(length: int, ranks: int, *, inverse: bool = False) -> np.ndarray:
    """The permutation of rows after which plain sharding `P("cp")` gives every rank its head and tail chunk.

    For data loaders and global view: `x[:, order]` sharded over the axis is what `split_sequence` makes inside
    `shard_map`. Nothing moves here; the result is a host array.

    PyTorch: `_HeadTailLoadBalancer` (row X6).

    Args:
        length: Rows of the whole sequence; a multiple of 2c.
        ranks: Ranks of the axis, c.
        inverse: The permutation that undoes it.

    Returns:
        int64[T].

    Raises:
        ParallelizeError: The length is not a multiple of 2c.

    Example:
        >>> order, back = head_tail_order(8, 2), head_tail_order(8, 2, inverse=True)
        >>> order.tolist(), order[back].tolist()
        ([0, 1, 6, 7, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7])
    """
    if length % (2 * ranks):
        raise ParallelizeError(
            f"head_tail_order: {length} rows do not divide into 2 x {ranks} = {2 * ranks} chunks, a head and a tail "
            f"for each of {ranks} ranks. Pad the sequence at its end to padded_length({length}, {ranks}) = "
            f"{padded_length(length, ranks)} rows."
        )
    chunks = np.arange(length).reshape(2, ranks, -1)
    order = np.stack([chunks[0], chunks[1, ::-1]], axis=1).reshape(length)
    return np.argsort(order) if inverse else order


def num_chunks(ranks: int, load_balanced: bool) -> int:
    """Chunks that the sequence is cut into."""
    return 2 * ranks if load_balanced and ranks > 1 else ranks


def chunks_of(rank: jax.Array | int, ranks: int, load_balanced: bool) -> tuple[jax.Array | int, ...]:
    """The chunks that a rank holds, in the order of the sequence."""
    return (rank, 2 * ranks - 1 - rank) if load_balanced and ranks > 1 else (rank,)


def check_two_chunks(where: str, rows: int, axis: str, ranks: int) -> None:
    """Raise `ParallelizeError` unless a rank's rows are a head and a tail of equal length."""
    if rows % 2:
        raise ParallelizeError(
            f"{where}: each of {ranks} ranks of axis {axis!r} holds {rows} rows of the sequence, an odd number. In the "
            f"head-tail layout a rank holds two chunks of equal length, so the sequence divides by 2 x {ranks}: "
            f"{ranks * rows} does not. Use split_sequence, which pads to {padded_length(ranks * rows, ranks)}, or the "
            "contiguous layout with load_balanced=False."
        )
