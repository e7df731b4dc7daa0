"""A Grain data set under DataLoader: the guarantees of DataLoader, Grain's randomness, Grain's threads and processes."""

import subprocess
import sys
import threading

import absl.flags
import grain
import jax
import numpy as np
import pytest

from jaxpar._errors import BatchError
from jaxpar.data import DataLoader, GrainSource, prefetch_to_device
from jaxpar.mesh import init_device_mesh


def numbers(length: int) -> grain.MapDataset:
    """Sample i is i, and noise that Grain draws for it."""

    def noisy(i: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"i": np.int32(i), "noise": np.float32(rng.random())}

    return grain.MapDataset.range(length).seed(3).random_map(noisy)


def make(dataset, size: int = 8, *, devices: int = 2, **options) -> DataLoader:
    mesh = init_device_mesh((devices,), ("dp",), devices=jax.devices()[:devices])
    return DataLoader(dataset, size, mesh=mesh, batch_axes="dp", **options)


def real(item) -> list[tuple[int, float]]:
    batch, mask = item
    keep = np.asarray(mask)
    return list(
        zip(np.asarray(batch["i"])[keep].tolist(), np.asarray(batch["noise"])[keep].tolist(), strict=True)
    )


@pytest.mark.parametrize("num_threads", [0, 4])
def test_4_2_3_4_devices_see_the_batches_of_one_with_the_same_noise(num_threads: int) -> None:
    dataset = GrainSource(numbers(50), num_threads=num_threads)
    expected = [real(item) for item in make(dataset, devices=1)]
    seen, state = [], None
    for devices, num_batches in [(4, 2), (2, 1), (3, 2), (4, 99)]:
        loader = make(dataset, devices=devices)
        if state:
            loader.load_state_dict(state)
        for _, item in zip(range(num_batches), loader, strict=False):
            seen.append(real(item))
        state = loader.state_dict()
    assert seen == expected
    assert sorted(i for batch in seen for i, _ in batch) == list(range(50))


def test_noise_and_order_differ_by_epoch() -> None:
    loader = make(numbers(16))  # a MapDataset need not be wrapped
    first, second = ([pair for item in loader for pair in real(item)] for _ in range(2))
    assert [i for i, _ in first] != [i for i, _ in second]
    assert sorted(i for i, _ in first) == sorted(i for i, _ in second) == list(range(16))
    assert all(dict(first)[i] != dict(second)[i] for i in range(16))


def test_the_order_may_be_that_of_grain() -> None:
    shuffled = grain.MapDataset.range(20).shuffle(seed=1)
    loader = make(shuffled, 20, shuffle=False)
    orders = [np.asarray(batch).tolist() for _ in range(2) for batch, _ in loader]
    assert orders == [[shuffled[i] for i in range(20)], [shuffled[20 + i] for i in range(20)]]


def test_grains_threads_end_with_the_pass() -> None:
    for _ in make(GrainSource(numbers(200), num_threads=3)):
        break
    for thread in threading.enumerate():
        if thread.name.startswith("grain-prefetch"):
            thread.join(5)
            assert not thread.is_alive()
    assert not any(thread.name == "jaxpar-data" for thread in threading.enumerate())


def test_a_sample_that_is_filtered_out_is_named() -> None:
    with pytest.raises(BatchError, match=r"sample 5 of epoch 0 is filtered out.*weight 0"):
        list(make(grain.MapDataset.range(8).filter(lambda i: i != 5), shuffle=False))


def test_a_stream_of_grain_splits_itself_and_keeps_its_own_state() -> None:
    stream = grain.MapDataset.range(64).batch(8).to_iter_dataset()
    with pytest.raises(BatchError, match=r"no grain.MapDataset: .* prefetch_to_device\(iter\(dataset\)"):
        make(stream)
    mesh = init_device_mesh((8,), ("dp",))
    with prefetch_to_device(iter(stream), mesh, "dp") as batches:
        assert [int(next(batches)[0]) for _ in range(3)] == [0, 8, 16]
        state = batches.state_dict()
    resumed = iter(stream)
    resumed.set_state(state)
    with prefetch_to_device(resumed, mesh, "dp") as batches:
        assert int(next(batches)[0]) == 24


def test_without_grain_the_error_says_what_to_install_and_the_rest_works(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "grain", None)  # importing it raises ImportError
    assert len(list(make(np.zeros(16)))) == 2
    with pytest.raises(BatchError, match=r"Grain is not installed. Write pip install 'jaxpar\[examples\]'"):
        GrainSource([1, 2])  # type: ignore[arg-type]


def test_workers_without_parsed_flags_are_refused_with_the_line_to_write() -> None:
    flags = absl.flags.FLAGS
    was_parsed = flags.is_parsed()
    flags.unparse_flags()
    try:
        with pytest.raises(BatchError, match=r"num_workers=2, .* absl.flags.FLAGS.mark_as_parsed\(\)"):
            GrainSource(numbers(8), num_workers=2)
    finally:
        if was_parsed:
            flags.mark_as_parsed()


@pytest.mark.parametrize("counts", [{"num_threads": -1}, {"num_workers": -2}])
def test_counts_of_readers_are_checked(counts: dict[str, int]) -> None:
    with pytest.raises(BatchError, match=r"=-\d, .*but both are counts|workers=-2, but both are counts"):
        GrainSource(numbers(8), **counts)


WORKERS = """
import os

import absl.flags
import grain
import numpy as np

import jaxpar
from jaxpar.data import DataLoader, GrainSource

def tagged(i):
    return {"i": np.int32(i), "process": np.int32(os.getpid())}

if __name__ == "__main__":
    absl.flags.FLAGS.mark_as_parsed()
    mesh = jaxpar.init_device_mesh((1,), ("dp",))
    source = GrainSource(grain.MapDataset.range(22).map(tagged), num_workers=2)
    loader = DataLoader(source, 4, mesh=mesh, batch_axes="dp", shuffle=False)
    items = [(np.asarray(b["i"])[np.asarray(m)].tolist(), set(np.asarray(b["process"]).tolist())) for b, m in loader]
    assert sum((rows for rows, _ in items), []) == list(range(22)), items
    processes = set.union(*(processes for _, processes in items))
    assert all(len(p) == 1 for _, p in items) and len(processes) == 2 and os.getpid() not in processes, items
    print("in order from", len(processes))
"""


def test_workers_of_grain_prepare_batches_in_order(tmp_path) -> None:
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=180)
    assert ended.stdout == "in order from 2\n", ended.stderr
