"""The roll call and the front desk, one thread per process: every fault is named by all, when it is seen."""

import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxpar._errors import ProcessGroupError
from jaxpar.mesh._front_desk import meet_at_front_desk
from jaxpar.mesh._group import Membership
from jaxpar.mesh._roll_call import Entry, roll_call
from jaxpar_launch.store import StoreClient, StoreServer

FAST_S, SLOW_S = 0.5, 20.0


def entry(rank: int, world_size: int = 2, *, host: str = "a", version: str = "1") -> Entry:
    return Entry(rank, world_size, pid=1000 + rank, host=host, jax=version)


def call(entries: Sequence[Entry], *, timeout_s: float = SLOW_S) -> list[int | ProcessGroupError]:
    """What each process gets out of the roll call: its local rank, or the error."""
    with StoreServer("127.0.0.1", token="t") as server:

        def come(one: Entry) -> int:
            with StoreClient(server.address, token="t", timeout_s=5) as store:
                return roll_call(store, one, prefix="roll", timeout_s=timeout_s)

        return in_threads([lambda one=one: come(one) for one in entries])


def in_threads(tasks: Sequence[Callable[[], int]]) -> list[int | ProcessGroupError]:
    def caught(task: Callable[[], int]) -> int | ProcessGroupError:
        try:
            return task()
        except ProcessGroupError as error:
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(caught, tasks))


def assert_all_say(outcomes: Sequence[int | ProcessGroupError], pattern: str) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, ProcessGroupError) and re.search(pattern, str(outcome)), outcome


@pytest.mark.parametrize("world_size", [1, 2, 4, 16])
def test_a_complete_world_passes_and_counts_local_ranks(world_size: int) -> None:
    entries = [entry(rank, world_size, host="ab"[rank % 2]) for rank in range(world_size)]
    assert call(entries) == [rank // 2 for rank in range(world_size)]


@pytest.mark.parametrize(
    ("entries", "pattern"),
    [
        ([entry(0), entry(2)], r"rank 2 is out of range \(pid 1002 on a\): a world of 2 has ranks 0 to 1"),
        ([entry(0), entry(-1)], r"rank -1 is out of range"),
        ([entry(0), entry(0)], r"rank 0 is taken 2 times: pid 1000 on a, pid 1000 on a"),
        ([entry(1), entry(1, host="b")], r"rank 1 is taken 2 times: pid 1001 on \w, pid 1001 on \w"),
        ([entry(0), entry(1, 3)], r"world_size differs: \d on ranks \[\d\]; \d on ranks \[\d\]"),
        ([entry(0), entry(1, version="2")], r"the JAX version differs: \d on ranks \[\d\]; \d on ranks"),
    ],
)
def test_a_fault_is_named_by_all_at_once(entries: list[Entry], pattern: str) -> None:
    start = time.monotonic()
    assert_all_say(call(entries), pattern)
    assert time.monotonic() - start < 5, "the deadline is 20 s away"


def test_all_faults_are_in_one_message() -> None:
    outcomes = call([entry(0, 3), entry(0, 3), entry(7, 4)])
    # Whoever came before the last fault could be seen has only the first, but all have the same message.
    assert len({re.sub(r"\(this is .*?\):", "", str(outcome)) for outcome in outcomes}) == 1


def test_missing_ranks_are_named_at_the_deadline() -> None:
    start = time.monotonic()
    assert_all_say(call([entry(3, 5), entry(0, 5)], timeout_s=FAST_S), r"ranks \[1, 2, 4\] of 5 did not come")
    assert FAST_S <= time.monotonic() - start < 5


def test_many_missing_ranks_are_shortened() -> None:
    assert_all_say(call([entry(0, 99)], timeout_s=0.1), r"ranks \[1, 2, .*8\] and 90 more of 99")


def test_a_latecomer_hears_the_same_verdict() -> None:
    with (
        StoreServer("127.0.0.1", token="t") as server,
        StoreClient(server.address, token="t", timeout_s=5) as store,
    ):
        for rank in (0, 1):  # rank 1 comes after rank 0 has given up
            with pytest.raises(ProcessGroupError, match=r"ranks \[1\] of 2 did not come within 0.1 s"):
                roll_call(store, entry(rank), prefix="roll", timeout_s=0.1)


def test_an_intruder_is_turned_away_and_the_job_is_not_disturbed() -> None:
    with (
        StoreServer("127.0.0.1", token="t") as server,
        StoreClient(server.address, token="t", timeout_s=5) as store,
    ):
        roll_call(store, entry(0, 1), prefix="roll", timeout_s=5)
        with pytest.raises(
            ProcessGroupError, match=r"(?s)rank 0 is taken 2 times.*goes on without this process"
        ):
            roll_call(store, entry(0, 1), prefix="roll", timeout_s=5)


# The front desk ------------------------------------------------------------------------------------------------


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def visit(address: str, rank: int, world_size: int, *, timeout_s: float = SLOW_S, barrier=None) -> int:
    """Meets at the front desk, then in the store that it hands out. Returns how many met there."""
    deadline = time.monotonic() + timeout_s
    member = Membership(rank, world_size, coordinator_address=address)
    local_rank, venue, hosted = meet_at_front_desk(member, deadline)
    assert local_rank == rank, "all are on this host"
    with StoreClient(venue.address, token=venue.token, timeout_s=5) as store:
        count = store.add("met")
        if barrier is not None:
            barrier.wait(10)
    if hosted is not None:
        hosted.close()
    return count


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_front_desk_hands_out_one_store_and_frees_its_port(address: str, world_size: int) -> None:
    barrier = threading.Barrier(world_size)
    tasks = [
        lambda rank=rank: visit(address, rank, world_size, barrier=barrier) for rank in range(world_size)
    ]
    assert sorted(in_threads(tasks)) == list(range(1, world_size + 1))  # type: ignore[type-var]
    socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))).close()


def test_two_rank_zeros_name_each_other(address: str) -> None:
    assert_all_say(in_threads([lambda: visit(address, 0, 2)] * 2), "rank 0 is taken 2 times")


def test_a_missing_rank_zero_is_named(address: str) -> None:
    outcomes = in_threads([lambda: visit(address, 1, 2, timeout_s=FAST_S)])
    assert_all_say(outcomes, rf"rank 1 of 2 found nobody at the coordinator: nothing answers at {address}")


def test_a_port_in_use_is_named_by_rank_zero_and_by_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        outcomes = in_threads(
            [lambda rank=rank: visit(address, rank, 2, timeout_s=FAST_S) for rank in (0, 1)]
        )
    assert_all_say(
        outcomes[:1], rf"rank 0 cannot listen at the coordinator's address {address}: the port is in use"
    )
    assert_all_say(outcomes[1:], rf"something listens at {address}, but it is no .* store")


def test_a_port_that_may_not_be_used_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> StoreServer:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("jaxpar.mesh._front_desk.StoreServer", refuse)
    assert_all_say(
        in_threads([lambda: visit(address, 0, 2)]), rf"rank 0 cannot listen at {address}: .*Permission denied"
    )
