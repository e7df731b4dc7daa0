"""Barriers, object collectives and fingerprints, one thread per process: the same code as between processes.

Each thread has its own `ProcessGroup` on one real store; only the lookup of "the group of this process" is replaced.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpar._errors import CollectiveError, DesyncError, JaxparError, ProcessGroupError
from jaxpar.mesh import (
    _fingerprint,
    _objects,
    _process_group,
    all_gather_object,
    assert_same_everywhere,
    barrier,
    broadcast_object,
    get_rank,
    process_allgather,
)
from jaxpar.mesh._group import Membership, ProcessGroup
from jaxpar.mesh._meeting import meet
from jaxpar.mesh._object_codec import UnencodableError, decode_object, encode_object
from jaxpar_launch.store import StoreClient, StoreServer

SIZES = [1, 2, 4]
Everywhere = Callable[..., list[Any]]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Everywhere]:
    """`everywhere(n, f)` runs f() on n ranks; results and jaxpar's errors in rank order."""
    here = threading.local()
    for module in (_process_group, _objects, _fingerprint):
        monkeypatch.setattr(module, "current_group", lambda: here.group)
    with StoreServer("127.0.0.1", token="t") as server:

        def run(world_size: int, task: Callable[[], Any], *, timeout_s: float = 10.0) -> list[Any]:
            def one(rank: int) -> Any:
                with StoreClient(server.address, token="t", timeout_s=5) as store:
                    member = Membership(rank, world_size)
                    group = ProcessGroup(
                        member, timeout_s=timeout_s, shutdown_timeout_s=5, store=store, prefix="g"
                    )
                    here.group = group
                    try:
                        return task()
                    except JaxparError as error:
                        return error
                    finally:
                        group.close()

            with ThreadPoolExecutor(world_size) as pool:
                return list(pool.map(one, range(world_size)))

        run.server = server  # type: ignore[attr-defined]
        yield run


def assert_all_raised(outcomes: list[Any], error: type[Exception], pattern: str) -> None:
    for outcome in outcomes:
        assert type(outcome) is error and re.search(pattern, str(outcome), re.DOTALL), outcome


# Barriers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", SIZES)
def test_nobody_leaves_a_barrier_before_all_have_come(everywhere: Everywhere, world_size: int) -> None:
    def task() -> tuple[float, float]:
        time.sleep(0.05 * get_rank())
        came = time.monotonic()
        barrier("b")
        return came, time.monotonic()

    times = everywhere(world_size, task)
    assert max(came for came, _ in times) <= min(left for _, left in times)


def test_a_barrier_works_again_and_again_and_leaves_nothing_behind(everywhere: Everywhere) -> None:
    everywhere(3, lambda: [barrier(f"b/{i % 2}") for i in range(20)])
    with StoreClient(everywhere.server.address, token="t", timeout_s=5) as store:  # type: ignore[attr-defined]
        assert store.keys() == []


def test_missing_ranks_are_named_on_every_process_that_came(everywhere: Everywhere) -> None:
    def task() -> None:
        if get_rank() in (0, 2):
            barrier("save", timeout_s=0.4)

    start = time.monotonic()
    outcomes = everywhere(4, task)
    pattern = r"barrier 'save': ranks \[1, 3\] of 4 did not come within 0.4 s .*rank 1: is at no meeting"
    assert_all_raised([outcomes[0], outcomes[2]], ProcessGroupError, pattern)
    assert time.monotonic() - start < 5


def test_a_missing_rank_zero_is_named(everywhere: Everywhere) -> None:
    outcomes = everywhere(3, lambda: get_rank() and barrier("save", timeout_s=0.3))
    assert_all_raised(outcomes[1:], ProcessGroupError, r"ranks \[0\] of 3 did not come")


def test_a_rank_that_waits_elsewhere_is_said_to(everywhere: Everywhere) -> None:
    outcomes = everywhere(2, lambda: barrier("ab"[get_rank()], timeout_s=0.4))
    assert_all_raised(
        outcomes[:1], ProcessGroupError, r"barrier 'a': ranks \[1\].*rank 1: waits at barrier 'b' instead"
    )
    assert_all_raised(
        outcomes[1:], ProcessGroupError, r"barrier 'b': ranks \[0\].*rank 0: waits at barrier 'a' instead"
    )


def test_a_rank_that_comes_too_late_fails_like_the_others(everywhere: Everywhere) -> None:
    def task() -> None:
        time.sleep(1.0 * get_rank())
        barrier("save", timeout_s=0.3)

    outcomes = everywhere(2, task)
    assert_all_raised(outcomes[:1], ProcessGroupError, r"ranks \[1\] of 2 did not come")
    assert_all_raised(
        outcomes[1:], ProcessGroupError, r"this process, rank 1, came too late: rank 0 had waited 0.3"
    )


def test_a_rank_zero_that_comes_too_late_does_not_wait_again(everywhere: Everywhere) -> None:
    def task() -> float:
        start = time.monotonic()
        if get_rank() == 0:
            time.sleep(0.8)
        with pytest.raises(ProcessGroupError, match=r"came too late|ranks \[0\] of 3 did not come"):
            barrier("save", timeout_s=5.0 if get_rank() == 0 else 0.3)
        return time.monotonic() - start

    assert max(everywhere(3, task)) < 4


def test_only_the_members_meet(everywhere: Everywhere) -> None:
    def task() -> Any:
        members, group = (1, 3), _process_group.current_group()
        if group.rank in members:
            return meet(group, "some", group.rank, judge=sum, members=members)[0]

    assert everywhere(4, task) == [None, 4, None, 4]


def test_the_last_words_of_a_failed_rank_are_passed_on(everywhere: Everywhere) -> None:
    def task() -> None:
        if get_rank() == 1:
            _process_group.current_group().report_failure("ValueError: no data")
        else:
            barrier("save", timeout_s=0.4)

    assert_all_raised(everywhere(2, task)[:1], ProcessGroupError, r"rank 1: failed with ValueError: no data")


def test_a_lost_store_is_an_error(everywhere: Everywhere) -> None:
    def task() -> None:
        barrier("first")
        everywhere.server.close()  # type: ignore[attr-defined]
        barrier("second", timeout_s=0.2)

    assert_all_raised(
        everywhere(2, task), ProcessGroupError, r"barrier '(first|second)': rank \d lost the job's store"
    )


# Object collectives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", SIZES)
def test_gather_and_broadcast_give_all_the_same(everywhere: Everywhere, world_size: int) -> None:
    def task() -> Any:
        gathered = all_gather_object({"rank": get_rank(), "x": (1, [None])})
        return gathered, broadcast_object(f"from {get_rank()}", root=world_size - 1)

    expected = [{"rank": rank, "x": (1, [None])} for rank in range(world_size)]
    assert everywhere(world_size, task) == [(expected, f"from {world_size - 1}")] * world_size


@pytest.mark.parametrize("world_size", SIZES)
def test_process_allgather_stacks_by_rank_for_any_world_size(everywhere: Everywhere, world_size: int) -> None:
    for rows in everywhere(world_size, lambda: process_allgather(jnp.full((2, 3), get_rank(), jnp.bfloat16))):
        assert rows.shape == (world_size, 2, 3) and rows.dtype == ml_dtypes.bfloat16
        assert rows[:, 0, 0].tolist() == list(range(world_size))


def test_process_allgather_of_unequal_shapes_is_named_everywhere(everywhere: Everywhere) -> None:
    outcomes = everywhere(2, lambda: process_allgather(np.zeros(2 + get_rank(), np.float32)))
    assert_all_raised(outcomes, CollectiveError, r"rank 0: float32\[2\], rank 1: float32\[3\]")


def test_a_value_that_cannot_travel_is_named_everywhere(everywhere: Everywhere) -> None:
    outcomes = everywhere(2, lambda: all_gather_object({"a": [0, object() if get_rank() == 1 else 1]}))
    assert_all_raised(
        outcomes, CollectiveError, r"rank 1 cannot send its value: value\['a'\]\[1\] is a .*object"
    )


def test_a_root_that_raises_raises_everywhere(everywhere: Everywhere) -> None:
    def download() -> None:
        raise OSError("no network")

    outcomes = everywhere(3, lambda: broadcast_object(download, root=1))
    assert_all_raised(outcomes, ProcessGroupError, r"broadcast_object: rank 1 raised: OSError: no network")
    assert isinstance(outcomes[1].__cause__, OSError) and outcomes[0].__cause__ is None


def test_two_roots_are_named_everywhere(everywhere: Everywhere) -> None:
    outcomes = everywhere(2, lambda: broadcast_object(1, root=get_rank()))
    assert_all_raised(outcomes, DesyncError, r"different roots: rank 0: root=0, rank 1: root=1")


@pytest.mark.parametrize("world_size", SIZES)
def test_a_root_out_of_range_is_named_everywhere(everywhere: Everywhere, world_size: int) -> None:
    outcomes = everywhere(world_size, lambda: broadcast_object(1, root=world_size))
    assert_all_raised(outcomes, CollectiveError, rf"root={world_size} is no rank of this job")


# The fingerprint -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", SIZES)
def test_equal_facts_pass(everywhere: Everywhere, world_size: int) -> None:
    task = lambda: assert_same_everywhere("the first step", {"mesh": "dp=4", "program": "ab"})  # noqa: E731
    assert everywhere(world_size, task) == [None] * world_size


def test_each_fact_that_differs_is_named_everywhere_at_once(everywhere: Everywhere) -> None:
    def task() -> None:
        facts = {"mesh": "dp=2" if get_rank() != 2 else "tp=2", "program": "ab"}
        facts |= {"batch": "8"} if get_rank() == 0 else {}
        assert_same_everywhere("the first step", facts)

    start = time.monotonic()
    pattern = (
        r"the 4 processes disagree before the first step .*mesh: ranks \[0, 1, 3\]: 'dp=2'; ranks \[2\]: 'tp=2'"
        r".*batch: ranks \[0\]: '8'; ranks \[1, 2, 3\]: \(not stated\)"
    )
    outcomes = everywhere(4, task)
    assert time.monotonic() - start < 5
    assert_all_raised(outcomes, DesyncError, pattern)
    assert "program" not in str(outcomes[0])


def test_long_values_are_shown_where_they_differ(everywhere: Everywhere) -> None:
    def task() -> None:
        assert_same_everywhere("a step", {"program": "x" * 5000 + f"rank {get_rank()}" + "y" * 5000})

    outcomes = everywhere(2, task)
    assert_all_raised(outcomes, DesyncError, r"\.\.\.'x+rank 0y+'\.\.\. \(10006 characters\).*rank 1y")
    assert len(str(outcomes[0])) < 1500


# The codec -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**80,
        -0.0,
        float("inf"),
        "\u00fc",
        b"\x00\xff",
        [],
        (),
        {},
        {"a": (1, [2.5, None])},
        {1: "int", 2.5: "float", None: "none", False: "bool"},
        ["list", "tuple", ["dict"]],
    ],
    ids=repr,
)
def test_plain_values_keep_value_and_type(value: Any) -> None:
    back = decode_object(encode_object(value))
    assert back == value and repr(back) == repr(value)


@pytest.mark.parametrize(
    "dtype",
    [*"?bBhilLefdFD", "U3", "S2", "M8[s]", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3)])
def test_arrays_keep_dtype_shape_and_bits(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(6).astype(dtype)[: int(np.prod(shape))].reshape(shape)
    for one in (array, np.asfortranarray(array), array[...][()]):
        back = decode_object(encode_object(one))
        assert type(back) is type(one) and back.dtype == one.dtype and back.shape == one.shape
        assert back.tobytes() == one.tobytes()


def test_a_decoded_array_can_be_written() -> None:
    decode_object(encode_object(np.zeros(3)))[0] = 1


def itself() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        ({"a": {1, 2}}, r"value\['a'\] is a builtins.set\. None, bool, int"),
        ({"a": {(1, 2): 3}}, r"value\['a'\] has the key \(1, 2\) of type tuple"),
        (np.array([object()]), r"value is an array of dtype object"),
        (np.zeros(2, [("a", "i4")]), r"value is an array of dtype \[\('a', '<i4'\)\]"),
        (np.ma.zeros(3), r"value is a MaskedArray"),
        ([jnp.zeros(3)], r"value\[0\] is a .*ArrayImpl\. Write np.asarray\(value\)"),
        (itself(), "value is nested too deeply, or contains itself"),
        (np.zeros(40 << 20, np.uint8), r"over the limit of 33554432 bytes"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_travel_is_named_by_its_path(value: Any, pattern: str) -> None:
    with pytest.raises(UnencodableError, match=pattern):
        encode_object(value)
