"""Buckets: which gradients travel together.

    gradients in the order they become ready    [head 1 MiB] [block3 | block2 25 MiB] [block1 | block0 | embed ...]

The last layers' gradients are ready first, so the first bucket is small: communication starts early.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar._errors import ParallelizeError

MIB = 1024 * 1024
DEFAULT_BUCKET_BYTES = 25 * MIB
DEFAULT_FIRST_BUCKET_BYTES = 1 * MIB


@dataclass(frozen=True)
class Group:
    """What leaves must have in common to share a bucket.

    Args:
        axes: mesh axes to reduce over.
        dtype: name of the dtype.
        varying: mesh axes over which the leaves differ and go on differing (a tensor-parallel axis).
    """

    axes: tuple[str, ...]
    dtype: str
    varying: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bucket:
    """Leaves that are reduced by one collective.

    Args:
        index: place among the buckets, in the order in which they are reduced.
        leaves: positions in the flattened tree, in the order in which their gradients become ready.
        axes: mesh axes to reduce over.
        varying: mesh axes over which the leaves differ and go on differing (a tensor-parallel axis).
        num_bytes: bytes of the leaves, per device.
        is_last: no bucket follows.
    """

    index: int
    leaves: tuple[int, ...]
    axes: tuple[str, ...]
    varying: tuple[str, ...]
    num_bytes: int
    is_last: bool = False


def assign_buckets(
    sizes_bytes: Sequence[int],
    groups: Sequence[Group],
    *,
    order: Sequence[int] | None = None,
    bucket_bytes: int | Sequence[int] = DEFAULT_BUCKET_BYTES,
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES,
) -> tuple[Bucket, ...]:
    """Fills buckets in the order in which gradients become ready.

    A leaf joins the open bucket of its group (same axes, same dtype); a bucket that has reached its size is
    closed. A leaf that fills a bucket is a bucket of its own: it is not copied. Source: DDP's bucketing, PyTorch row P3.

    Args:
        sizes_bytes: bytes of each leaf, per device.
        groups: of each leaf, what it must share with its bucket; leaves without axes are in no bucket.
        order: the leaves in the order in which their gradients become ready; default: last leaf first.
        bucket_bytes: a bucket is closed once it holds this much; a sequence gives the size of each bucket in turn,
            its last one for all that follow (row P4).
        first_bucket_bytes: the same for the first bucket of all; of no meaning beside a sequence.

    Returns:
        The buckets, in the order in which they are reduced.

    Raises:
        ParallelizeError: a bucket size is not positive.

    Example:
        >>> from jaxpar.ddp import Group, assign_buckets
        >>> buckets = assign_buckets([8, 8, 8], [Group(("dp",), "float32")] * 3, bucket_bytes=16, first_bucket_bytes=8)
        >>> [bucket.leaves for bucket in buckets]
        [(2,), (1, 0)]
    """
    limits = bucket_limits(bucket_bytes, first_bucket_bytes)
    open_buckets: dict[Group, list[int]] = {}
    closed: list[tuple[Group, list[int]]] = []
    for leaf in order if order is not None else range(len(sizes_bytes) - 1, -1, -1):
        if not groups[leaf].axes or not sizes_bytes[leaf]:
            continue
        limit = limits[min(len(closed), len(limits) - 1)]
        if sizes_bytes[leaf] >= limit:
            closed.append((groups[leaf], [leaf]))
            continue
        members = open_buckets.setdefault(groups[leaf], [])
        members.append(leaf)
        if sum(sizes_bytes[i] for i in members) >= limit:
            closed.append((groups[leaf], open_buckets.pop(groups[leaf])))
    closed += open_buckets.items()
    return tuple(
        Bucket(
            index=index,
            leaves=tuple(members),
            axes=group.axes,
            varying=group.varying,
            num_bytes=sum(sizes_bytes[i] for i in members),
            is_last=index == len(closed) - 1,
        )
        for index, (group, members) in enumerate(closed)
    )


def bucket_limits(bucket_bytes: int | Sequence[int], first_bucket_bytes: int) -> tuple[int, ...]:
    """Returns the sizes at which the first, second, ... bucket is closed; the last one goes on for ever."""
    limits = (first_bucket_bytes, bucket_bytes) if isinstance(bucket_bytes, int) else tuple(bucket_bytes)
    if not limits or min(limits) <= 0:
        raise ParallelizeError(
            f"bucket sizes must be positive, got bucket_bytes={bucket_bytes}, first_bucket_bytes={first_bucket_bytes}. A "
            f"bucket holds at least one gradient; write bucket_bytes=1, first_bucket_bytes=1 for one all-reduce per "
            f"parameter, or leave the defaults."
        )
    return limits
