"""When checkpoints are made, which stay, what comes back beside the arrays, and what does not fit."""

import json
import os
import signal
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.checkpoint import CheckpointError, CheckpointManager
from jaxpar.debug import count_compilations
from jaxpar.fsdp import full_state, fully_shard
from jaxpar.mesh import init_device_mesh


class Tiny(nnx.Module):
    """Parameters, a statistic, a key and a number outside JAX."""

    def __init__(self, width: int = 4, *, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.linear = nnx.Linear(width, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.seen = nnx.Variable(np.float64(0.1))


def optimizer_of(model: nnx.Module) -> nnx.Optimizer:
    return nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def state(module: nnx.Pytree) -> list[np.ndarray]:
    is_key = lambda x: jnp.issubdtype(getattr(x, "dtype", int), jax.dtypes.prng_key)  # noqa: E731
    return [
        np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(nnx.state(module))
    ]


def assert_same(a: nnx.Pytree, b: nnx.Pytree) -> None:
    for x, y in zip(state(a), state(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_everything_of_a_plain_model_comes_back(tmp_path: Path) -> None:
    model, average = Tiny(), Tiny(seed=3)
    extra = {"average": average, "run": "a", "limits": [1, 2.5, None]}
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore(model) is None
        assert manager.save(
            7, model, optimizer_of(model), data_state={"epoch": 1}, extra=extra, metrics={"loss": 0.5}
        )
    other, other_average = Tiny(seed=1), Tiny(seed=2)
    optimizer = optimizer_of(other)
    with CheckpointManager(tmp_path) as manager:
        found = manager.restore(other, optimizer, extra={"average": other_average})
    assert found is not None
    assert (found.step, found.data_state, found.metrics) == (7, {"epoch": 1}, {"loss": 0.5})
    assert found.extra == {"run": "a", "limits": [1, 2.5, None]}
    assert_same(model, other)
    assert_same(average, other_average)
    assert_same(optimizer_of(model), optimizer)


def test_a_model_without_values_is_filled(tmp_path: Path) -> None:
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, model)
        empty = nnx.eval_shape(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
        with pytest.raises(
            CheckpointError, match=r"2 variables have a shape and no sharding, first model: bias"
        ):
            manager.restore(empty)
        fully_shard(empty, mesh["dp"])
        manager.restore(empty)
    assert empty.kernel[...].sharding.shard_shape((8, 4)) == (2, 4)
    assert_same(model, empty)


def test_saving_shapes_without_values_is_refused(tmp_path: Path) -> None:
    empty = nnx.eval_shape(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointError, match="2 variables have shapes but no values yet, first model: bias"),
    ):
        manager.save(1, empty)


def test_training_may_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Donated buffers are not written over before they are copied (PyTorch #144657)."""
    mesh = init_device_mesh((2,), ("dp",), devices=jax.devices()[:2])
    model = fully_shard(nnx.Linear(512, 256, rngs=nnx.Rngs(0)), mesh["dp"])
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh)
    x = np.ones((4, 512), np.float32)
    step(x)
    with CheckpointManager(tmp_path) as manager:
        before = np.array(model.kernel[...])
        manager.save(1, model, optimizer)
        for _ in range(20):
            step(x)
        manager.restore(model, optimizer)
    np.testing.assert_array_equal(np.asarray(model.kernel[...]), before)


def test_padded_parameters_are_made_whole_by_one_program_for_all_saves(tmp_path: Path) -> None:
    class Odd(nnx.Module):
        def __init__(self) -> None:
            self.scale = nnx.Param(jnp.arange(15.0).reshape(3, 5))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.scale[...]

    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    model = fully_shard(Odd(), mesh["dp"], pad_above_bytes=0)
    with CheckpointManager(tmp_path) as manager:
        with count_compilations() as first:
            manager.save(1, model)
        with count_compilations() as second:
            manager.save(2, model)
        assert manager.restore(model) is not None
    assert (first.count > 0, second.count) == (True, 0)
    assert full_state(model)["scale"].tolist() == np.arange(15.0).reshape(3, 5).tolist()


def test_schedule_by_steps_and_what_stays(tmp_path: Path) -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    losses = {2: 0.9, 4: 0.1, 6: 0.5, 8: float("nan"), 10: 0.4, 12: 0.3, 14: 0.2}
    with CheckpointManager(tmp_path, every_steps=2, keep=2, keep_every=6, best=("loss", "min")) as manager:
        saved = [s for s in range(1, 15) if manager.save(s, model, metrics={"loss": losses.get(s, 0.0)})]
        assert saved == [2, 4, 6, 8, 10, 12, 14]
        manager.wait()
        assert manager.steps() == [4, 6, 12, 14]  # best; multiples of 6; the last two
        assert not manager.save(14, model, force=True)
        assert manager.save(15, model, force=True)
    assert json.loads((tmp_path / "14" / "contents" / "metadata").read_text())["metrics"] == {"loss": 0.2}


def test_schedule_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("jaxpar.checkpoint._due.time.monotonic", lambda: now)
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with CheckpointManager(tmp_path, every_steps=None, every_minutes=1, keep=None) as manager:
        saved = []
        for step in range(1, 10):
            now += 25.0
            if manager.save(step, model):
                saved.append(step)
    assert saved == [3, 6, 9]


def test_sigterm_saves_and_asks_to_stop(tmp_path: Path) -> None:
    model, before = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path, every_steps=100) as manager:
        assert not manager.save(1, model) and not manager.should_stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.save(2, model) and manager.should_stop
        assert manager.steps() == [2]  # complete already
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_manager_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    before, model = signal.getsignal(signal.SIGTERM), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    said = []

    def save() -> None:
        with CheckpointManager(tmp_path) as manager:
            said.append((manager.save(1, model), signal.getsignal(signal.SIGTERM) == before))

    thread = threading.Thread(target=save)
    thread.start()
    thread.join(timeout=60)
    assert said == [(True, True)]


def test_all_differences_are_named_at_once_and_nothing_is_changed(tmp_path: Path) -> None:
    class Other(Tiny):
        def __init__(self) -> None:
            super().__init__(width=6)
            self.norm.scale = nnx.Param(jnp.ones(2, jnp.bfloat16))
            self.head = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            self.dropout.rngs = nnx.Rngs(default=jax.random.key(0, impl="rbg")).default.fork()
            del self.seen

    with CheckpointManager(tmp_path) as manager:
        manager.save(3, Tiny())
        other = Other()
        before = state(other)
        with pytest.raises(CheckpointError) as found:
            manager.restore(other)
    lines = str(found.value).splitlines()
    assert lines[0].endswith("3 does not fit the model: 7 differences; nothing was changed:")
    assert {line.strip() for line in lines[1:-1]} == {
        "model: head.bias: missing from the checkpoint (float32[3])",
        "model: head.kernel: missing from the checkpoint (float32[2, 3])",
        "model: linear.kernel: shape [4, 2] in the checkpoint, [6, 2] here",
        "model: norm.scale: dtype float32 in the checkpoint, bfloat16 here",
        "model: dropout.rngs.key: shape [2] in the checkpoint, [4] here",
        "model: dropout.rngs.key: key threefry2x32 in the checkpoint, rbg here",
        "model: seen: in the checkpoint, and no variable has this name",
    }
    for x, y in zip(before, state(other), strict=True):
        np.testing.assert_array_equal(x, y)


def test_partial_restore_names_what_it_left(tmp_path: Path) -> None:
    class WithHead(Tiny):
        def __init__(self) -> None:
            super().__init__(seed=5)
            self.head = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    with CheckpointManager(tmp_path) as manager:
        source = Tiny()
        manager.save(3, source, optimizer_of(source))
        model = WithHead()
        before = np.array(model.head.kernel[...])
        found = manager.restore(model, strict=False)  # the optimizer stays on the disk
    assert found is not None and set(found.left) == {"head.bias", "head.kernel"}
    np.testing.assert_array_equal(model.linear.kernel[...], source.linear.kernel[...])
    np.testing.assert_array_equal(model.head.kernel[...], before)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every_steps": 0}, r"every_steps=0 must be positive"),
        ({"keep": -1}, r"keep=-1 must be positive"),
        ({"best": ("loss", "low")}, r"best=\('loss', 'min'\) or best=\('loss', 'max'\)"),
    ],
)
def test_options_without_meaning(tmp_path: Path, options: dict, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        CheckpointManager(tmp_path, **options)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"data_state": {1: 2}}, "would come back changed from JSON"),
        ({"data_state": {"x": np.ones(3)}}, "data_state cannot be written as JSON"),
        ({"extra": {"x": {1, 2}}}, "arrays go into an nnx.Module"),
    ],
)
def test_values_that_json_cannot_hold(tmp_path: Path, given: dict, text: str) -> None:
    with CheckpointManager(tmp_path) as manager, pytest.raises(CheckpointError, match=text):
        manager.save(1, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), **given)


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with CheckpointManager(tmp_path) as manager:
        manager.save(4, model)
        manager.wait()
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 5; it has those of \[4\]"):
            manager.restore(model, step=5)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be used for checkpoints"):
        CheckpointManager(tmp_path / "file")


def test_arrays_are_read_in_batches_of_the_memory_allowed(tmp_path: Path) -> None:
    """Largest parts: 64 bytes of each kernel on each device, 256 of a process, 16 of the bias that stays whole."""
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    model = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh)
    with CheckpointManager(tmp_path, memory_bytes=1) as manager:
        manager.save(1, model)
    for memory_bytes, num_batches in ((1, 2), (1 << 20, 1)):
        other, read = fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(1)), mesh), []
        with CheckpointManager(tmp_path, memory_bytes=memory_bytes) as manager:
            restore = manager._store.restore
            manager._store.restore = lambda step, wanted: (read.append(wanted), restore(step, wanted))[1]  # noqa: B023
            manager.restore(other)
        assert len(read) == num_batches
        for name, x in full_state(model).items():
            np.testing.assert_array_equal(full_state(other)[name], x)
