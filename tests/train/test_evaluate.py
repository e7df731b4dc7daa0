"""`TrainStep.evaluate`, PP6: the metrics of a step, and nothing else: no gradient, no change, the model's mode of the moment."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import BatchError, ParallelizeError
from jaxpar.fsdp import fully_shard
from jaxpar.pp import _walk, pipeline

WIDTH = 4
BATCH = {
    "x": np.random.default_rng(0).normal(size=(12, WIDTH)).astype(np.float32),
    "weight": np.linspace(0.0, 1.0, 12, dtype=np.float32),
}


class Layer(nnx.Module):
    def __init__(self, seed: int) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(seed))
        self.norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(seed))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jnp.tanh(self.norm(self.linear(x))))


def make_model() -> Any:
    return nnx.Sequential(*[Layer(i) for i in range(2)])


class Gradients:
    """A loss function that counts how often it is differentiated."""

    def __init__(self) -> None:
        self.count = 0

        @jax.custom_vjp
        def watched(x: jax.Array) -> jax.Array:
            return x

        def forward(x: jax.Array) -> tuple[jax.Array, None]:
            self.count += 1
            return x, None

        watched.defvjp(forward, lambda _, g: (g,))
        self.watched = watched

    def __call__(self, model: Any, batch: Any) -> tuple[jaxpar.Mean, dict[str, Any]]:
        losses = self.watched((model(batch["x"]) ** 2).sum(-1))
        metrics = {
            "largest": jaxpar.Mean(losses.sum(), jnp.float32(losses.size)),
            "weight": batch["weight"].mean(),
        }
        return jaxpar.Mean((losses * batch["weight"]).sum(), batch["weight"].sum()), metrics


def reference(model: Any) -> dict[str, Any]:
    loss, metrics = Gradients()(model, BATCH)
    return {"loss": loss.value, "largest": metrics["largest"].value, "weight": metrics["weight"]}


def fused(loss: Any, **options: Any) -> tuple[Any, jaxpar.TrainStep]:
    mesh = jaxpar.init_device_mesh((2,), ("dp",), devices=jax.devices()[:2])
    model = fully_shard(make_model(), mesh["dp"])
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return model, jaxpar.TrainStep(loss, model, optimizer, mesh=mesh, **options)


def pipelined(loss: Any, executor: Any = "mpmd") -> tuple[Any, jaxpar.TrainStep]:
    mesh = jaxpar.init_device_mesh((2, 2), ("pp", "dp"), devices=jax.devices()[:4])
    model = pipeline(make_model(), mesh["pp"], n_stages=2, n_microbatches=3, executor=executor)
    return model, jaxpar.TrainStep(
        loss, model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), mesh=mesh
    )


ENGINES = {
    "fused": fused,
    "accumulating": lambda loss: fused(loss, accumulate=3, accumulate_unsharded=True),
    "mpmd": pipelined,
    "spmd": lambda loss: pipelined(loss, executor="spmd"),
}


def numbers(model: Any) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey)))]


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_it_equals_one_device_and_changes_nothing(make: Any) -> None:
    loss = Gradients()
    model, step = make(loss)
    alone = make_model()
    alone.eval()
    model.train()
    before = numbers(model)
    model.eval()
    for name, value in step.evaluate(BATCH).items():  # before any step
        np.testing.assert_allclose(value, reference(alone)[name], rtol=1e-5, err_msg=name)
    assert [a.tobytes() for a in before] == [a.tobytes() for a in numbers(model)]
    step(BATCH)
    before, num_gradients = numbers(model), loss.count
    nnx.update(alone, jax.tree.map(np.array, nnx.state(model, nnx.Not(nnx.RngState))))
    for name, value in step.evaluate(BATCH).items():
        np.testing.assert_allclose(value, reference(alone)[name], rtol=1e-5, err_msg=name)
    assert [a.tobytes() for a in before] == [a.tobytes() for a in numbers(model)]
    assert loss.count == num_gradients > 0


@pytest.mark.parametrize("make", [fused, pipelined], ids=["fused", "1F1B"])
def test_a_model_that_trains_is_evaluated_as_the_next_step_will_see_it(make: Any) -> None:
    """Dropout draws what it will draw, batch statistics are those of the microbatches."""
    model, step = make(Gradients())
    model.train()
    expected = step.evaluate(BATCH)
    model.eval()
    assert float(step.evaluate(BATCH)["loss"]) != float(expected["loss"])
    for name, value in step(BATCH).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, err_msg=name)


def test_a_pipeline_keeps_no_activation_while_it_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    model, step = pipelined(Gradients())
    model.eval()
    held, do = [], _walk._Run.do

    def watched(run: Any, action: Any) -> None:
        do(run, action)
        held.append((str(action), len(run.stash)))

    monkeypatch.setattr(_walk._Run, "do", watched)
    step.evaluate(BATCH)
    assert sorted(held) == [(f"{stage}F{m}", 0) for stage in range(2) for m in range(3)]
    engine: Any = step._engine
    stages = [compiled.stages for key, compiled in engine._compiled.items() if key[0] is not None]
    assert [[stage.code.kept for stage in some] for some in stages] == [[(), ()]]


def test_each_mode_is_compiled_once() -> None:
    model, step = fused(Gradients())
    with jaxpar.debug.count_compilations() as compiled:
        for _ in range(2):
            model.eval()
            step.evaluate(BATCH)
            model.train()
            step.evaluate(BATCH)
    assert compiled.count_of("jit(evaluate)") == 2


def test_what_cannot_be_evaluated() -> None:
    model, step = fused(Gradients())
    with pytest.raises(BatchError, match="a batch of 11 samples does not split over batch_axes dp=2"):
        step.evaluate({name: x[:11] for name, x in BATCH.items()})
    model.more = nnx.Param(jnp.ones(3))
    with pytest.raises(
        ParallelizeError, match=r"has other variables than when .*: 17 now, 16 then. Build a new"
    ):
        step.evaluate(BATCH)
