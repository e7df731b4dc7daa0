"""DataLoader: the same batches on every mesh, a state that counts what was handed out, threads that end, waits measured."""

import json
import threading
import time

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import BatchError, MeshError
from jaxpar.data import DataLoader, DistributedSampler
from jaxpar.mesh import DeviceMesh, init_device_mesh


def mesh_of(size: int) -> DeviceMesh:
    return init_device_mesh((size,), ("dp",), devices=jax.devices()[:size])


def make(dataset, size: int = 12, *, devices: int = 2, **options) -> DataLoader:
    return DataLoader(dataset, size, mesh=mesh_of(devices), batch_axes="dp", **options)


def real(batch: jax.Array, mask: jax.Array) -> list[int]:
    return np.asarray(batch)[np.asarray(mask)].tolist()


def num_threads() -> int:
    return sum(thread.name == "jaxpar-data" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert num_threads() == 0


class Counted:
    """Sample i is {"i": i, "square": i * i}; counts its reads, may be slow or fail."""

    def __init__(self, length: int, *, duration_s: float = 0.0, fails_at: int | None = None) -> None:
        self.num_reads = 0
        self._length, self._duration_s, self._fails_at = length, duration_s, fails_at

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> dict[str, np.generic]:
        self.num_reads += 1
        time.sleep(self._duration_s)
        if i == self._fails_at:
            raise OSError(f"sample {i} cannot be read")
        return {"i": np.int32(i), "square": np.int32(i * i)}


def test_4_2_3_4_devices_see_the_batches_of_one_and_every_sample_once() -> None:
    data = np.arange(100)
    expected = [real(*item) for item in make(data, devices=1)]
    seen, state = [], None
    for devices, num_batches in [(4, 2), (2, 3), (3, 1), (4, 99)]:
        loader = make(data, devices=devices)
        if state:
            loader.load_state_dict(state)
        for _, (batch, mask) in zip(range(num_batches), loader, strict=False):
            assert len(batch.sharding.device_set) == devices and batch.shape == mask.shape == (12,)
            seen.append(real(batch, mask))
            state = json.loads(json.dumps(loader.state_dict()))
    assert seen == expected and sorted(sum(seen, [])) == list(range(100))


def test_a_batch_that_does_not_divide_is_filled_up_and_the_samples_stay() -> None:
    data = np.arange(30)
    expected = [real(*item) for item in make(data, 8, devices=1)]
    for options, rows in [({}, 9), ({"rows_multiple_of": 2}, 12)]:
        items = list(make(data, 8, devices=3, **options))
        assert [batch.shape for batch, _ in items] == [(rows,)] * 4
        assert [real(*item) for item in items] == expected


class Line(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(np.zeros(3, np.float32))


def squared_error(model: Line, batch: dict) -> jaxpar.Mean:
    error = batch["x"] @ model.w[...] - batch["y"]
    return jaxpar.Mean((error**2 * batch["mask"]).sum(), batch["mask"].sum())


def losses_on(loader: DataLoader, model: Line, devices: int, num_steps: int) -> list[float]:
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(squared_error, model, optimizer, mesh=mesh_of(devices))
    return [
        float(step({**batch, "mask": mask})["loss"])
        for _, (batch, mask) in zip(range(num_steps), loader, strict=False)
    ]


def test_the_loss_curve_is_that_of_one_device_through_4_2_3_4() -> None:
    noise = np.random.default_rng(0)
    data = {"x": noise.normal(size=(92, 3)).astype(np.float32), "y": noise.normal(size=92).astype(np.float32)}
    expected = losses_on(make(data, 8, devices=1), Line(), 1, 99)
    losses, state, w = [], None, np.zeros(3, np.float32)
    for devices, num_steps in [(4, 3), (2, 3), (3, 3), (4, 99)]:
        loader, model = make(data, 8, devices=devices), Line()
        model.w[...] = w
        if state:
            loader.load_state_dict(state)
        losses += losses_on(loader, model, devices, num_steps)
        state, w = loader.state_dict(), np.asarray(model.w[...])
    assert len(expected) == 12
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_the_state_counts_what_was_handed_out_and_not_what_was_read_ahead(num_ahead: int) -> None:
    dataset = Counted(60)
    loader = make(dataset, 6, num_ahead=num_ahead)
    for i, _ in enumerate(loader):
        if i == 1:
            wait_until(lambda: dataset.num_reads == (2 + num_ahead) * 6)
            assert loader.state_dict()["offset"] == 12
            break
    time.sleep(0.05)
    assert dataset.num_reads == (2 + num_ahead) * 6, "never more than num_ahead"


def wait_until(is_so) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_pass_goes_on_after_a_break_and_epochs_follow_each_other() -> None:
    loader = make(np.arange(30), 10)
    assert len(loader) == 3
    first = real(*next(iter(loader)))
    rest = [real(*item) for item in loader]
    assert sorted(sum(rest, first)) == list(range(30)) and loader.epoch == 1
    second = [real(*item) for item in loader]
    assert sorted(sum(second, [])) == list(range(30)) and loader.epoch == 2
    assert second[0] != first


def test_a_state_that_is_loaded_in_a_pass_ends_it_and_so_does_another_pass() -> None:
    loader = make(np.arange(30), 10)
    begin, seen = loader.state_dict(), []
    for item in loader:
        seen.append(real(*item))
        if len(seen) == 2:
            loader.load_state_dict(begin)
    assert len(seen) == 2 and loader.state_dict() == begin
    first, second = iter(loader), iter(loader)
    assert [real(*next(first)), real(*next(second))] == seen
    assert next(first, None) is None and len(list(second)) == 1 and loader.epoch == 1


def test_the_epochs_of_a_resumed_loader_are_those_of_one_that_went_through() -> None:
    through, resumed = make(np.arange(30), 10), make(np.arange(30), 10)
    expected = [real(*item) for _ in range(3) for item in through]
    got = [real(*item) for item in resumed]
    at_the_end = resumed.state_dict()
    for stop in (at_the_end, {**DistributedSampler(30, num_replicas=1, rank=0).state_dict(30)}):
        again = make(np.arange(30), 10)
        again.load_state_dict(stop)
        rest = [real(*item) for _ in range(again.epoch, 3) for item in again]
        assert got + rest == expected


def test_drop_last_leaves_out_a_batch_that_is_not_full() -> None:
    loader = make(np.arange(29), 10, drop_last=True)
    items = list(loader)
    assert len(loader) == len(items) == 2 and all(np.asarray(mask).all() for _, mask in items)
    assert loader.epoch == 1


def test_columns_samples_and_many_samples_at_once_are_the_same_batches(tmp_path) -> None:
    class AtOnce(Counted):
        def __getitems__(self, indices: list[int]) -> list[dict[str, np.generic]]:
            return [Counted.__getitem__(self, i) for i in indices]

        def __getitem__(self, i: int) -> dict[str, np.generic]:
            raise AssertionError("one by one")

    numbers = np.arange(20, dtype=np.int32)
    np.save(tmp_path / "i.npy", numbers)
    columns = {"i": np.load(tmp_path / "i.npy", mmap_mode="r"), "square": numbers**2}
    for (a, mask), (b, _), (c, _) in zip(make(columns), make(Counted(20)), make(AtOnce(20)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
        jax.tree.map(np.testing.assert_array_equal, a, c)
        np.testing.assert_array_equal(a["i"] ** 2, a["square"])
        assert mask.sharding == a["i"].sharding


def test_host_rows_stay_on_the_host() -> None:
    ((batch, mask),) = make(np.arange(12), to_devices=False, shuffle=False)
    assert type(batch) is np.ndarray and type(mask) is np.ndarray
    np.testing.assert_array_equal(batch, np.arange(12))


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_an_error_comes_up_in_the_place_of_its_batch_and_says_which(num_ahead: int) -> None:
    loader = make(Counted(40, fails_at=25), 10, num_ahead=num_ahead, shuffle=False)
    seen = []
    with pytest.raises(OSError, match="sample 25 cannot be read") as raised:
        for batch, _ in loader:
            seen.append(np.asarray(batch["i"])[0])
    assert seen == [0, 10] and loader.state_dict()["offset"] == 20
    assert "DataLoader: while reading samples 20, 21, 22, 23, 24, 25, 26, 27, ... of epoch 0" in "".join(
        raised.value.__notes__
    )


def test_the_thread_ends_when_the_loop_raises_and_when_an_iterator_is_forgotten() -> None:
    with pytest.raises(KeyError):
        for _ in make(np.arange(1000), 2):
            raise KeyError
    iterator = iter(make(np.arange(1000), 2))
    next(iterator)
    assert num_threads() == 1
    del iterator
    assert num_threads() == 0


def test_a_slow_data_set_shows_in_the_wait_and_a_slow_step_hides_it() -> None:
    loader = make(Counted(16, duration_s=0.02), 2, shuffle=False)
    for _ in loader:
        pass
    slow_input = loader.wait_metrics()
    assert slow_input["input_wait_share"] > 0.8 and slow_input["input_wait_s"] > 0.02
    for i, _ in enumerate(loader):
        if i == 0:
            loader.wait_metrics()  # the first batch cannot be ahead
        time.sleep(0.15)
    slow_step = loader.wait_metrics()
    assert slow_step["input_wait_share"] < 0.25
    assert loader.wait_metrics() == {"input_wait_s": 0.0, "input_wait_share": 0.0}


def test_precision_of_the_loop_holds_in_the_thread() -> None:
    with jax.enable_x64(True):
        ((batch, _),) = make(np.arange(4.0), 4)
    assert batch.dtype == np.float64


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (iter(range(3)), {}, r"a range_iterator has no len\(\) or cannot be indexed.*prefetch_to_device"),
        (
            {"x": np.zeros(3), "y": np.zeros(4)},
            {},
            r"DataLoader: the leaves disagree .* 'x' has 3, 'y' has 4",
        ),
        (np.zeros(3), {"num_ahead": -1}, r"num_ahead=-1 batches cannot be made ahead"),
        (np.zeros(3), {"rows_multiple_of": 0}, r"DataLoader: rows_multiple_of=0"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_once(dataset, options: dict, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        make(dataset, **options)


def test_an_axis_that_is_not_there_and_a_state_of_other_data_are_named() -> None:
    with pytest.raises(MeshError, match="ddp"):
        DataLoader(np.zeros(8), 8, mesh=mesh_of(2), batch_axes="ddp")
    with pytest.raises(BatchError, match=r"DataLoader.load_state_dict: .* length=8 \(here 9\)"):
        make(np.zeros(9)).load_state_dict(make(np.zeros(8)).state_dict())
