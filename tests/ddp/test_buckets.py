"""Laws of the bucket assignment, for any sizes, groups and order (rows P3, P4)."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar._errors import ParallelizeError
from jaxpar.ddp import Bucket, Group, assign_buckets

GROUPS = [
    Group(("dp",), "float32"),
    Group(("dp",), "bfloat16"),
    Group(("dp",), "float32", ("tp",)),
    Group((), "float32"),
]


LEAVES = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(GROUPS)), max_size=10)
SIZES = st.integers(1, 60)
LAWS = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def _ready(num_leaves: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(num_leaves), num_leaves)


@given(LEAVES, SIZES | st.lists(SIZES, min_size=1, max_size=3), SIZES, st.integers(0, 99))
@LAWS
def test_each_leaf_is_in_one_bucket_of_its_group(
    leaves: list[tuple[int, Group]], bucket_bytes: int | list[int], first_bucket_bytes: int, seed: int
) -> None:
    sizes, groups, order = (
        [size for size, _ in leaves],
        [group for _, group in leaves],
        _ready(len(leaves), seed),
    )
    buckets = assign_buckets(
        sizes, groups, order=order, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes
    )
    reduced = [i for i, (size, group) in enumerate(leaves) if size and group.axes]
    assert sorted(i for bucket in buckets for i in bucket.leaves) == reduced
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert [bucket.is_last for bucket in buckets] == [False] * (len(buckets) - 1) + [True] * bool(buckets)
    for bucket in buckets:
        (group,) = {groups[i] for i in bucket.leaves}
        assert (bucket.axes, bucket.varying) == (group.axes, group.varying)
        assert bucket.num_bytes == sum(sizes[i] for i in bucket.leaves)
        ready = [order.index(i) for i in bucket.leaves]
        assert ready == sorted(ready)


@given(LEAVES, SIZES, st.integers(0, 99))
@LAWS
def test_buckets_are_closed_when_full_and_reduced_in_that_order(
    leaves: list[tuple[int, Group]], limit: int, seed: int
) -> None:
    sizes, groups, order = (
        [size for size, _ in leaves],
        [group for _, group in leaves],
        _ready(len(leaves), seed),
    )
    buckets = assign_buckets(sizes, groups, order=order, bucket_bytes=limit, first_bucket_bytes=limit)
    full = [bucket for bucket in buckets if bucket.num_bytes >= limit]
    assert buckets[: len(full)] == tuple(full)
    filled = [max(order.index(i) for i in bucket.leaves) for bucket in full]
    assert filled == sorted(filled)
    for bucket in full:
        assert bucket.num_bytes - sizes[bucket.leaves[-1]] < limit
        assert (
            len(bucket.leaves) == 1 or max(sizes[i] for i in bucket.leaves) < limit
        )  # a large leaf is alone
    open_at_the_end = [groups[bucket.leaves[0]] for bucket in buckets[len(full) :]]
    assert len(set(open_at_the_end)) == len(open_at_the_end)


@pytest.mark.parametrize(
    ("sizes", "options", "leaves"),
    [
        ([8, 8, 8, 8], {"bucket_bytes": 16, "first_bucket_bytes": 8}, [(3,), (2, 1), (0,)]),
        ([8, 8, 8, 8], {"bucket_bytes": 1 << 30, "first_bucket_bytes": 1 << 30}, [(3, 2, 1, 0)]),
        ([8, 8, 8, 8], {"bucket_bytes": 1, "first_bucket_bytes": 1}, [(3,), (2,), (1,), (0,)]),
        ([8, 8, 8, 8], {"bucket_bytes": (24, 8)}, [(3, 2, 1), (0,)]),
        (
            [8, 8, 8, 8],
            {"bucket_bytes": 16, "first_bucket_bytes": 16, "order": (0, 2, 1, 3)},
            [(0, 2), (1, 3)],
        ),
        (
            [4, 100, 4],
            {"bucket_bytes": 50, "first_bucket_bytes": 50},
            [(1,), (2, 0)],
        ),  # a large leaf is alone
    ],
)
def test_buckets_of_small_cases(
    sizes: list[int], options: dict[str, Any], leaves: list[tuple[int, ...]]
) -> None:
    buckets = assign_buckets(sizes, [GROUPS[0]] * len(sizes), **options)
    assert [bucket.leaves for bucket in buckets] == leaves


def test_default_sizes_are_pytorchs() -> None:
    mib = 1024 * 1024
    buckets = assign_buckets([mib] * 30, [GROUPS[0]] * 30)
    assert [bucket.num_bytes for bucket in buckets] == [mib, 25 * mib, 4 * mib]
    assert buckets[0] == Bucket(0, (29,), ("dp",), (), mib)


def test_nothing_to_reduce_is_no_bucket() -> None:
    assert assign_buckets([8, 0], [GROUPS[3], GROUPS[0]]) == ()


@pytest.mark.parametrize("options", [{"bucket_bytes": 0}, {"first_bucket_bytes": -1}, {"bucket_bytes": ()}])
def test_bucket_sizes_must_be_positive(options: dict[str, Any]) -> None:
    with pytest.raises(ParallelizeError, match=r"bucket sizes must be positive.*write bucket_bytes=1"):
        assign_buckets([8], [GROUPS[0]], **options)
