"""What TrainStep says to a user, and what it hands back."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import BatchError, ParallelizeError
from jaxpar.ddp import DistributedDataParallel
from jaxpar.debug import assert_collectives, count_compilations
from jaxpar.mesh import init_device_mesh


def make_step(loss_fn: Any = None, num_ranks: int = 4, **options: Any) -> jaxpar.TrainStep:
    mesh = options.pop("mesh", None) or init_device_mesh(
        (num_ranks,), ("dp",), devices=jax.devices()[:num_ranks]
    )
    model = options.pop("model", None) or nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=options.pop("wrt", nnx.Param))
    loss_fn = loss_fn or (lambda model, batch: (model(batch) ** 2).mean())
    return jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, **options)


ROWS = np.arange(16, dtype=np.float32).reshape(8, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_axes": ("tp",)}, "'tp' is no axis of the mesh"),
        ({"batch_axes": ("dp", "dp")}, "names an axis twice"),
        ({"sequence_axes": "cp"}, "sequence_axes=('cp',): 'cp' is no axis of the mesh"),
        ({"sequence_axes": "dp"}, "'dp' is in batch_axes=('dp',) and in sequence_axes=('dp',)"),
        ({"accumulate": 0}, "at least 1 microbatch per step, got 0"),
        ({"wrt": nnx.BatchStat}, "nothing would be trained"),
        ({"mesh": init_device_mesh((2, 4), ("dp", "tp"))}, "say which of them split the batch"),
    ],
)
def test_options_that_cannot_be_are_refused_at_construction(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ParallelizeError, match=re.escape(text)):
        make_step(**options)


def test_ddp_over_other_axes_than_the_batch_is_refused() -> None:
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    model = DistributedDataParallel(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), mesh)
    with pytest.raises(ParallelizeError, match=re.escape("DistributedDataParallel(model, mesh['dp'])")):
        make_step(model=model, mesh=mesh, batch_axes="dp")


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (lambda m, b: m(b), "a loss is one floating number per device"),
        (lambda m, b: jnp.int32(3), "a loss is one floating number per device"),
        (lambda m, b: (m(b).mean(), [1.0]), "must be a dict of metrics"),
        (lambda m, b: (m(b).mean(), {"loss": 1.0}), "without the names 'loss' and 'grad_norm'"),
    ],
)
def test_losses_that_are_none_are_refused(loss_fn: Any, text: str) -> None:
    with pytest.raises(BatchError, match=re.escape(text)):
        make_step(loss_fn)(ROWS)


def test_a_loss_that_differs_along_another_axis_is_refused() -> None:
    mesh = init_device_mesh((2, 4), ("dp", "tp"))

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return model(batch).mean() * jax.lax.axis_index("tp")

    with pytest.raises(BatchError, match=re.escape("differs from device to device along mesh axis ['tp']")):
        make_step(loss_fn, mesh=mesh, batch_axes="dp")(ROWS)


def test_a_batch_that_does_not_divide_into_microbatches_names_the_numbers_and_the_cure() -> None:
    with pytest.raises(BatchError, match=re.escape("8 rows does not divide into 4 ranks")) as caught:
        make_step(accumulate=3)(ROWS)
    assert "pad_batch(batch, 12)" in str(caught.value)


def test_metrics_follow_the_rule_of_the_loss() -> None:
    weights = np.array([1, 1, 1, 1, 0, 0, 1, 0], np.float32)

    def loss_fn(model: Any, batch: Any) -> Any:
        x, w = batch
        means = {
            "weighted": jaxpar.Mean((x[:, 0] * w).sum(), w.sum()),
            "plain": x[:, 1].mean(),
            "each": x.mean(0),
        }
        return jaxpar.Mean((model(x)[:, 0] * w).sum(), w.sum()), means

    for accumulate in (1, 2):
        metrics = make_step(loss_fn, accumulate=accumulate)((ROWS, weights))
        assert set(metrics) == {"loss", "weighted", "plain", "each"}
        np.testing.assert_allclose(
            metrics["weighted"], (ROWS[:, 0] * weights).sum() / weights.sum(), rtol=1e-6
        )
        np.testing.assert_allclose(metrics["plain"], ROWS[:, 1].mean(), rtol=1e-6)
        np.testing.assert_allclose(metrics["each"], ROWS.mean(0), rtol=1e-6)


def test_a_mean_over_nothing_is_zero_with_zero_gradient() -> None:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel[...])
    step = make_step(lambda m, b: jaxpar.Mean((m(b) * 0).sum(), jnp.float32(0)), model=model)
    assert float(step(ROWS)["loss"]) == 0.0
    np.testing.assert_array_equal(np.asarray(model.kernel[...]), before)


def test_one_compilation_per_batch_shape_and_two_views_of_one_program() -> None:
    step = make_step()
    with count_compilations() as compilations:
        for rows in (ROWS, ROWS, ROWS[:4], ROWS[:4], ROWS):
            step(rows)
    assert compilations.count_of("jit(train_step)") == 2
    assert_collectives(step, ROWS, expected={("all_reduce", "dp"): 2})


def test_size_one_axes_cost_nothing() -> None:
    mesh = init_device_mesh((1, 1), ("dp", "tp"), devices=jax.devices()[:1])
    assert_collectives(make_step(mesh=mesh, batch_axes="dp"), ROWS, expected={}, mesh=mesh)


def test_lowering_needs_no_arrays() -> None:
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    model = nnx.eval_shape(lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    optimizer = nnx.eval_shape(lambda model: nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), model)
    step = jaxpar.TrainStep(lambda m, b: (m(b) ** 2).mean(), model, optimizer, mesh=mesh)
    rows = jax.ShapeDtypeStruct((8, 2), jnp.float32)
    assert_collectives(step.lower(rows).compile(), expected={("all_reduce", "dp"): 2}, mesh=mesh)


def test_the_callers_arrays_survive_donation() -> None:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    kernel = model.kernel[...]
    step = make_step(model=model)
    step(ROWS)
    assert not kernel.is_deleted()
    assert not np.array_equal(np.asarray(model.kernel[...]), np.asarray(kernel))


def test_frozen_variables_are_not_trained() -> None:
    class Frozen(nnx.Param):
        pass

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.w, self.scale = nnx.Param(jnp.ones((2, 1))), nnx.Variable(jnp.float32(2.0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w[...] * self.scale[...]

    model = Model()
    make_step(model=model)(ROWS)
    assert float(model.scale[...]) == 2.0
    assert not np.array_equal(np.asarray(model.w[...]), np.ones((2, 1)))


@pytest.mark.parametrize(("sync_buffers", "expected"), [("broadcast", 0.5), ("mean", 3.5)])
def test_buffers_that_ranks_made_differ_are_made_equal_on_the_way_of_the_loss(
    sync_buffers: Any, expected: float
) -> None:
    class Remembers(nnx.Module):
        def __init__(self) -> None:
            self.w, self.seen = nnx.Param(jnp.ones(())), nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.seen[...] = x.mean()
            return self.w[...] * x

    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    model = DistributedDataParallel(Remembers(), mesh, sync_buffers=sync_buffers)
    step = make_step(lambda m, x: m(x).mean(), model=model, mesh=mesh)
    rows = np.arange(8, dtype=np.float32)
    step(rows)
    assert [float(s.data) for s in model.seen[...].addressable_shards] == [expected] * 4
    assert_collectives(step, rows, expected={("all_reduce", "dp"): 2})


def test_buffers_cannot_stay_different() -> None:
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    with pytest.raises(ParallelizeError, match=re.escape("sync_buffers=False is neither 'broadcast'")):
        DistributedDataParallel(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), mesh, sync_buffers=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_plain_jax_meshes_are_taken_too(kind: str) -> None:
    axis_type = getattr(jax.sharding.AxisType, kind)
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(axis_type,), devices=jax.devices()[:4])
    model = DistributedDataParallel(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), mesh)
    plain, wrapped = make_step(), make_step(model=model, mesh=mesh)
    for _ in range(2):
        assert float(plain(ROWS)["loss"]) == float(wrapped(ROWS)["loss"])
