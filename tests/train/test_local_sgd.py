"""Replicas that train by themselves and are averaged (rows O3, P34), against NumPy and against data parallelism."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import BatchError, ParallelizeError
from jaxpar.checkpoint import CheckpointManager
from jaxpar.ddp import DistributedDataParallel, PowerSGD
from jaxpar.debug import assert_collectives, count_compilations
from jaxpar.fsdp import fully_shard, shard_optimizer_state
from jaxpar.mesh import DeviceMesh, init_device_mesh
from jaxpar.pp import pipeline
from jaxpar.tp import ColwiseParallel, RowwiseParallel, parallelize_module
from jaxpar.train import LocalSGDStep

RATE, MOMENTUM, OUTER_RATE, OUTER_MOMENTUM = 0.05, 0.5, 0.7, 0.9
NESTEROV = optax.sgd(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)


def mesh_of(**sizes: int) -> DeviceMesh:
    num = int(np.prod([*sizes.values()]))
    return init_device_mesh(tuple(sizes.values()), tuple(sizes), devices=jax.devices()[:num])


def numbers(key: Any, shape: tuple[int, ...], dtype: Any = np.float32) -> jax.Array:
    return jax.numpy.asarray(np.random.default_rng(0).normal(size=shape), dtype)


class Linear(nnx.Module):
    """y = x @ w, in the dtype of its batch."""

    def __init__(self, dtype: Any = np.float32) -> None:
        self.w = nnx.Param(numbers(None, (4, 2), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


class MLP(nnx.Module):
    """Two layers of `Linear` numbers: initializers would take longer to compile than the step."""

    def __init__(self, *, dropout: float = 0.0, has_norm: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(4, 8, rngs=rngs, kernel_init=numbers, bias_init=numbers)
        self.down = nnx.Linear(8, 2, rngs=rngs, kernel_init=numbers, bias_init=numbers)
        self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs) if has_norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.numpy.tanh(self.up(x))
        return self.down(self.dropout(x if self.norm is None else self.norm(x)))


def squares(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def batches(num: int, dtype: Any = np.float32) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [
        {"x": rng.normal(size=(8, 4)).astype(dtype), "y": rng.normal(size=(8, 2)).astype(dtype)}
        for _ in range(num)
    ]


def local_step(model: nnx.Module, mesh: DeviceMesh, tx: Any = None, **options: Any) -> LocalSGDStep:
    tx = optax.sgd(RATE, momentum=MOMENTUM) if tx is None else tx
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return LocalSGDStep(squares, model, optimizer, mesh=mesh, **options)


def in_numpy(
    w: np.ndarray, batches: list[Any], num: int, average: Callable[[int, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Replicas f32[R, 4, 2] after local steps, each followed by `average(steps done, replicas)`."""
    ws, velocity = np.stack([w] * num), np.zeros((num, *w.shape))
    for i, batch in enumerate(batches, start=1):
        for r in range(num):
            x, y = (np.split(batch[name], num)[r] for name in ("x", "y"))
            grad = 2 * x.T @ (x @ ws[r] - y) / y.size
            velocity[r] = MOMENTUM * velocity[r] + grad
            ws[r] -= RATE * velocity[r]
        ws = average(i, ws)
    return ws


def every(period: int, w: np.ndarray, *, is_outer: bool) -> Callable[[int, np.ndarray], np.ndarray]:
    """The mean of all, or DiLoCo's Nesterov step, written by hand."""
    anchor, velocity = w.copy(), np.zeros_like(w)

    def average(i: int, ws: np.ndarray) -> np.ndarray:
        nonlocal anchor, velocity
        if i % period:
            return ws
        if not is_outer:
            return np.broadcast_to(ws.mean(0), ws.shape).copy()
        moved = anchor - ws.mean(0)
        velocity = OUTER_MOMENTUM * velocity + moved
        anchor = anchor - OUTER_RATE * (moved + OUTER_MOMENTUM * velocity)
        return np.broadcast_to(anchor, ws.shape).copy()

    return average


@pytest.mark.parametrize(
    ("num", "period", "is_outer"), [(1, 2, True), (2, 3, False), (2, 2, True), (4, 2, False), (4, 3, True)]
)
def test_local_steps_then_the_mean_equal_numpy(num: int, period: int, is_outer: bool) -> None:
    with jax.enable_x64(True):
        model, data = Linear(np.float64), batches(7, np.float64)
        w = np.asarray(model.w[...])
        step = local_step(model, mesh_of(dp=num), period=period, outer=NESTEROV if is_outer else None)
        replicas: Any = step.state.model
        for batch in data:
            step(batch)
        last = len(data) - len(data) % period
        want = in_numpy(w, data, num, every(period, w, is_outer=is_outer))
        np.testing.assert_allclose(replicas.w[...], want, rtol=1e-12, atol=1e-12)
        averaged = in_numpy(w, data[:last], num, every(period, w, is_outer=is_outer))[0]
        np.testing.assert_allclose(model.w[...], averaged, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("outer", [None, optax.sgd(1.0)])
def test_period_1_with_sgd_equals_data_parallelism_also_after_a_warm_up(outer: Any) -> None:
    with jax.enable_x64(True):
        results, data = [], batches(5, np.float64)
        for is_local in (False, True):
            model, mesh = Linear(np.float64), mesh_of(dp=4)
            optimizer = nnx.Optimizer(model, optax.sgd(RATE, momentum=MOMENTUM), wrt=nnx.Param)
            step: Any = jaxpar.TrainStep(squares, model, optimizer, mesh=mesh)
            losses = [step(batch)["loss"] for batch in data[:2]]
            if is_local:
                step = LocalSGDStep(squares, model, optimizer, mesh=mesh, period=1, outer=outer)
            losses += [step(batch)["loss"] for batch in data[2:]]
            results.append((model.w[...], np.array(losses), step.evaluate(data[0])["loss"]))
        for got, want in zip(*results, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_a_hierarchy_averages_within_a_node_more_often() -> None:
    model, data = Linear(), batches(5)
    w = np.asarray(model.w[...])

    def average(i: int, ws: np.ndarray) -> np.ndarray:
        if i % 4 == 0:
            return np.broadcast_to(ws.mean(0), ws.shape).copy()
        return np.repeat(ws.reshape(2, 2, 4, 2).mean(1), 2, 0) if i % 2 == 0 else ws

    step = local_step(model, mesh_of(node=2, gpu=2), batch_axes=("node", "gpu"), period={"gpu": 2, "node": 4})
    replicas: Any = step.state.model
    for i, batch in enumerate(data, start=1):
        step(batch)
        want = in_numpy(w, data[:i], 4, average)
        np.testing.assert_allclose(replicas.w[...], want, rtol=1e-5, atol=1e-6)
    averaged = in_numpy(w, data[:4], 4, average)[0]
    np.testing.assert_allclose(model.w[...], averaged, rtol=1e-5, atol=1e-6)


def test_a_local_step_moves_the_loss_and_an_average_one_bucket_in_two_compilations() -> None:
    step, (batch,) = local_step(MLP(), mesh_of(dp=4), optax.adam(0.1), period=2, outer=NESTEROV), batches(1)
    with count_compilations() as compiled:
        for _ in range(5):
            step(batch)
        step.sync()
    assert (compiled.count_of("jit(train_step)"), compiled.count_of("jit(average)")) == (1, 1)
    assert_collectives(step, batch, expected={("all_reduce", "dp"): 1}, bytes={"all_reduce": 4})
    bytes_: dict[Any, int] = {"all_reduce": 4 * (4 * 8 + 8 + 8 * 2 + 2)}
    average = step.lower_average().compile()
    assert_collectives(average, mesh=mesh_of(dp=4), expected={("all_reduce", "dp"): 1}, bytes=bytes_)


def sharded_over_dp(model: nnx.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh["in"])


def split_over_tp(model: nnx.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["in"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def wrapped(model: nnx.Module, mesh: DeviceMesh) -> None:
    DistributedDataParallel(model, mesh)


@pytest.mark.parametrize(
    ("parallelize", "batch_axes", "dropout"),
    [(sharded_over_dp, ("node", "in"), 0.3), (split_over_tp, ("node",), 0.0), (wrapped, ("node", "in"), 0.3)],
)
def test_replicas_may_be_parallel_in_themselves(parallelize: Any, batch_axes: Any, dropout: float) -> None:
    """Two replicas on two devices each, and two on one each: the same losses, clipped gradients, and averages."""
    got = trained(mesh_of(**{"node": 2, "in": 2}), batch_axes, dropout, parallelize)
    for x, want in zip(got, trained(mesh_of(node=2), ("node",), dropout), strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-6)


@functools.cache
def trained(mesh: DeviceMesh, batch_axes: Any, dropout: float, parallelize: Any = None) -> list[Any]:
    """Losses and norms, the average, and all replicas, after three steps."""
    model = MLP(dropout=dropout)
    if parallelize is not None:
        parallelize(model, mesh)
    step = local_step(
        model,
        mesh,
        optax.adam(0.01),
        batch_axes=batch_axes,
        period={"node": 2},
        clip_norm=0.5,
        outer=NESTEROV,
    )
    metrics = [step(batch) for batch in batches(3)]
    arrays = jax.tree.leaves(nnx.state((model, step.state.model), nnx.Param))
    return [np.array([[m["loss"], m["grad_norm"]] for m in metrics]), *map(np.asarray, arrays)]


def test_a_checkpoint_between_two_averages_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    runs, data = [], batches(6)
    for is_new in (False, True):
        model = MLP(dropout=0.5, has_norm=True)
        optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
        step = LocalSGDStep(squares, model, optimizer, mesh=mesh_of(dp=2), period=2, outer=NESTEROV)
        with CheckpointManager(tmp_path, every_steps=3) as manager:
            if is_new:
                assert manager.restore(model, optimizer, extra={"replicas": step.state})
            else:
                for i, batch in enumerate(data[:3], start=1):
                    step(batch)
                    manager.save(i, model, optimizer, extra={"replicas": step.state})
        losses = [float(step(batch)["loss"]) for batch in data[3:]]
        runs.append((losses, [*map(np.asarray, jax.tree.leaves(nnx.state(model, nnx.Param)))]))
    jax.tree.map(np.testing.assert_array_equal, *runs)


def test_an_average_takes_the_mean_of_batch_statistics_and_may_come_out_of_turn() -> None:
    model = MLP(has_norm=True)
    step = local_step(model, mesh_of(dp=4), period=100)
    step(batches(1)[0])
    replicas: Any = step.state.model
    means = np.asarray(replicas.norm.mean[...]).copy()
    assert np.ptp(means, axis=0).min() > 0
    step.sync()
    assert model.norm is not None
    np.testing.assert_allclose(model.norm.mean[...], means.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(replicas.norm.mean[...], np.stack([model.norm.mean[...]] * 4))


def piped(model: nnx.Module, mesh: DeviceMesh) -> None:
    pipeline(model, mesh["in"], n_microbatches=2, split_spec={"down": "beginning"})


@pytest.mark.parametrize(
    ("parallelize", "period", "message"),
    [
        (None, 0, "'node' is averaged after 0 steps; it must be at least 1"),
        (None, {"node": 3, "in": 2}, "must be at least 1, and divide the longest period (3)"),
        (None, {"tp": 3}, "names ['tp'], but replicas lie along axes that split the batch"),
        (sharded_over_dp, 2, "down.bias is sharded over ('in',), and replicas that differ lie along"),
        (lambda m, mesh: DistributedDataParallel(m, mesh, comm_hook=PowerSGD()), 2, "keeps state from step"),
        (piped, 2, "LocalSGDStep: the model was given to jaxpar.pp.pipeline"),
    ],
)
def test_what_cannot_be_averaged_is_refused(parallelize: Any, period: Any, message: str) -> None:
    model, mesh = MLP(), mesh_of(**{"node": 2, "in": 2})
    if parallelize is not None:
        parallelize(model, mesh)
    with pytest.raises(ParallelizeError, match=re.escape(message)):
        local_step(model, mesh, batch_axes=("node", "in"), period=period)


def test_state_that_is_sharded_alone_is_refused() -> None:
    model, mesh = MLP(), mesh_of(**{"node": 2, "in": 2})
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    shard_optimizer_state(optimizer, mesh["in"])
    with pytest.raises(ParallelizeError, match="state is sharded and its parameters are not"):
        LocalSGDStep(squares, model, optimizer, mesh=mesh, batch_axes=("node", "in"), period={"node": 2})


class Counting(MLP):
    """Counts something of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.num_positive = nnx.Variable(jax.numpy.zeros((), np.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.num_positive[...] += (x > 0).sum()
        return super().__call__(x)


def test_integers_that_differ_between_replicas_are_refused() -> None:
    with pytest.raises(BatchError, match=r"\(int32\[\]\) differ between the ranks of \('dp',\)"):
        local_step(Counting(), mesh_of(dp=2), period=2)(batches(1)[0])


def test_without_batch_axes_there_are_no_replicas() -> None:
    with pytest.raises(ParallelizeError, match="there are no replicas to average"):
        local_step(MLP(), mesh_of(dp=2), batch_axes=(), period=2)
