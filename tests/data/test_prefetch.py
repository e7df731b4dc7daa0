"""prefetch_to_device: order, errors, state and end of a stream are those of reading it in the loop."""

import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar._errors import BatchError, MeshError
from jaxpar.data import prefetch_to_device
from jaxpar.mesh import init_device_mesh

MESH = init_device_mesh((4, 2), ("dp", "tp"))


def num_threads() -> int:
    return sum(thread.name == "jaxpar-data" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert num_threads() == 0


class Stream:
    """Batches [8] of 0, 1, 2, ...; its state is how many it has given."""

    def __init__(self, num_batches: int, *, first: int = 0) -> None:
        self.next, self._end = first, num_batches

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.next == self._end:
            raise StopIteration
        self.next += 1
        return {"x": np.full(8, self.next - 1)}

    def get_state(self) -> dict[str, int]:
        return {"next": self.next}


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_batches_come_in_order_placed_and_then_it_is_over(size: int) -> None:
    batches = prefetch_to_device(Stream(7), MESH, "dp", size=size)
    got = list(batches)
    assert [int(batch["x"][0]) for batch in got] == list(range(7))
    assert all(batch["x"].sharding.spec == P("dp") for batch in got)
    assert next(batches, None) is None


@pytest.mark.parametrize("size", [0, 2])
def test_the_state_is_that_after_the_batch_at_hand(size: int) -> None:
    stream = Stream(9)
    with prefetch_to_device(stream, MESH, "dp", size=size) as batches:
        assert batches.state_dict() == {"next": 0}
        for i in range(4):
            assert int(next(batches)["x"][0]) == i and batches.state_dict() == {"next": i + 1}
        state = batches.state_dict()
    resumed = prefetch_to_device(Stream(9, first=state["next"]), MESH, "dp", size=size)
    assert [int(batch["x"][0]) for batch in resumed] == [4, 5, 6, 7, 8]


def test_a_stream_without_a_state_says_so() -> None:
    with prefetch_to_device([np.zeros(8)], MESH, "dp") as batches:
        with pytest.raises(
            BatchError, match=r"says no state. It needs a method state_dict\(\), or get_state\(\)"
        ):
            batches.state_dict()


@pytest.mark.parametrize("size", [0, 2])
def test_errors_of_reading_and_of_placing_come_up_in_their_place(size: int) -> None:
    def stream(last: np.ndarray | None) -> Iterator[np.ndarray]:
        yield from (np.zeros(8), np.ones(8))
        if last is None:
            raise OSError("disk is gone")
        yield last

    for last, error, message in [
        (None, OSError, "disk is gone"),
        (np.zeros(6), BatchError, "6 / 4 leaves 2"),
    ]:
        batches = prefetch_to_device(stream(last), MESH, "dp", size=size)
        assert [float(next(batches)[0]), float(next(batches)[0])] == [0.0, 1.0]
        with pytest.raises(error, match=message):
            next(batches)
        assert next(batches, None) is None


def test_no_more_than_size_is_read_ahead_and_close_lets_go_of_it() -> None:
    stream = Stream(100)
    batches = prefetch_to_device(stream, MESH, "dp", size=3)
    deadline = time.monotonic() + 10
    while stream.next < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert stream.next == 3 and num_threads() == 1
    batches.close()
    batches.close()
    assert num_threads() == 0 and next(batches, None) is None


def test_a_forgotten_iterator_ends_its_thread() -> None:
    batches = prefetch_to_device(Stream(100), MESH, "dp")
    next(batches)
    del batches
    assert num_threads() == 0


def test_a_read_that_hangs_does_not_hold_up_the_end() -> None:
    goes_on = threading.Event()

    def stuck() -> Iterator[np.ndarray]:
        yield np.zeros(8)
        goes_on.wait(30)
        yield np.ones(8)

    batches = prefetch_to_device(stuck(), MESH, "dp")
    next(batches)
    begin = time.monotonic()
    batches.close()
    assert time.monotonic() - begin < 6
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "jaxpar-data")
    goes_on.set()
    thread.join(10)
    assert next(batches, None) is None


def test_waits_are_measured() -> None:
    def slow() -> Iterator[np.ndarray]:
        for _ in range(4):
            time.sleep(0.03)
            yield np.zeros(8)

    batches = prefetch_to_device(slow(), MESH, "dp")
    jax.block_until_ready(list(batches))
    assert batches.wait_metrics()["input_wait_share"] > 0.5


def test_a_wrong_size_or_axis_is_told_before_a_thread_starts() -> None:
    with pytest.raises(BatchError, match="size=-1 batches cannot be made ahead; 0 reads in the loop"):
        prefetch_to_device([], MESH, "dp", size=-1)
    with pytest.raises(MeshError, match="ddp"):
        prefetch_to_device([], MESH, "ddp")
