"""Accumulation both ways (rows F21, F22, X21): scattered in every microbatch, or gathered once and scattered once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.debug import assert_collectives
from jaxpar.fsdp import MixedPrecisionPolicy, fully_shard
from jaxpar.mesh import DeviceMesh, init_device_mesh

MICROBATCHES = 3


class Frozen(nnx.Param):
    """A parameter that is not trained."""


TRAINED = nnx.All(nnx.Param, nnx.Not(Frozen))


class Model(nnx.Module):
    """Two blocks that share a kernel, a frozen bias in one of them, and a bias of 3 that no axis divides."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.blocks[1].kernel = self.blocks[0].kernel
        self.blocks[0].bias = Frozen(jnp.arange(8.0) / 8)
        self.outer = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.inner(x)
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.outer(x)


def loss_fn(model: Any, batch: Any) -> jaxpar.Mean:
    losses = ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)
    return jaxpar.Mean((losses * batch["w"]).sum(), batch["w"].sum())


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (24, 4), "y": (24, 3)}
    rows = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return rows | {"w": np.arange(24, dtype=np.float32)}


@pytest.fixture(scope="module")
def reference(batch: dict[str, np.ndarray]) -> tuple[Any, Any]:
    graphdef, params, rest = nnx.split(Model(), TRAINED, ...)

    def mean(params: Any) -> jax.Array:
        return loss_fn(nnx.merge(graphdef, params, rest), batch).value

    return jax.value_and_grad(mean)(params)


def make_step(mesh: DeviceMesh, *, model: Any, **options: Any) -> tuple[nnx.Optimizer, jaxpar.TrainStep]:
    """A step whose optimizer keeps the gradients as its state, exactly."""
    optimizer = nnx.Optimizer(model, optax.trace(0.0), wrt=TRAINED)
    options = {"loss_fn": loss_fn} | options
    return optimizer, jaxpar.TrainStep(
        model=model, optimizer=optimizer, mesh=mesh, batch_axes=mesh.axis_names, **options
    )


def gradients_of(optimizer: nnx.Optimizer) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(optimizer.opt_state, nnx.OptState))


# A unit is one wire here: root, blocks.0, blocks.1. Blocks gather in forward and backward, the root in forward only;
# gathered once, the shared kernel goes with one of the blocks, and each block has another wire for the rest of it.
GATHERS = {False: 5 * MICROBATCHES, True: 3}
SCATTERS = {False: 3 * MICROBATCHES, True: 3}
FSDP = (4,), ("dp",), {("all_reduce", "dp"): 2}  # loss; the bias of 3
HSDP = (2, 2), ("replica", "dp"), {("all_reduce", ("replica", "dp")): 2, ("all_reduce", "replica"): 1}
ONE = (1,), ("dp",), {}


@pytest.mark.parametrize("unsharded", [False, True], ids=["each", "once"])
@pytest.mark.parametrize(("shape", "axes", "all_reduces"), [FSDP, HSDP, ONE], ids=["fsdp", "hsdp", "one"])
def test_gradients_are_those_of_the_union_batch_and_travel_as_often_as_said(
    shape: Any, axes: Any, all_reduces: Any, unsharded: bool, batch: Any, reference: Any
) -> None:
    mesh = init_device_mesh(shape, axes, devices=jax.devices()[: int(np.prod(shape))])
    model: Any = fully_shard(Model(), mesh, units="blocks.*")
    optimizer, step = make_step(mesh, model=model, accumulate=MICROBATCHES, accumulate_unsharded=unsharded)
    frozen = np.array(model.blocks[0].bias[...])

    expected = dict(all_reduces)
    if shape[-1] > 1:
        expected |= {("all_gather", "dp"): GATHERS[unsharded], ("reduce_scatter", "dp"): SCATTERS[unsharded]}
    assert_collectives(step, batch, expected=expected, mesh=mesh)

    loss = float(step(batch)["loss"])

    np.testing.assert_allclose(loss, reference[0], rtol=1e-5)
    for ours, theirs in zip(gradients_of(optimizer), jax.tree.leaves(reference[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert model.blocks[0].bias[...].sharding.shard_shape((8,)) == (8 // shape[-1],)
    np.testing.assert_array_equal(model.blocks[0].bias[...], frozen)
    stored = {x.sharding.shard_shape(x.shape) for x in gradients_of(optimizer)}
    assert (8 // shape[-1], 8) in stored


@pytest.mark.parametrize("unsharded", [False, True], ids=["each", "once"])
def test_the_sum_of_100_gradients_is_exact_in_fp32_though_parameters_are_bfloat16(unsharded: bool) -> None:
    mesh = init_device_mesh((2,), ("dp",), devices=jax.devices()[:2])
    policy = MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
    model = fully_shard(
        nnx.eval_shape(lambda: nnx.Linear(4, 2, use_bias=False, rngs=nnx.Rngs(0))), mesh, mp_policy=policy
    )
    model.kernel.set_value(jax.device_put(jnp.ones((4, 2)), model.kernel.get_value().sharding))
    rng = np.random.default_rng(0)
    x, y = (rng.integers(1, 4, (200, size)).astype(np.float32) for size in (4, 2))
    weight = (np.arange(200) == 7).astype(np.float32)  # the count of the whole batch is 1

    def total(model: Any, batch: Any) -> jaxpar.Mean:
        x, y, weight = batch
        return jaxpar.Mean((model(x) * y.astype(jnp.bfloat16)).sum(), weight.sum())

    optimizer, step = make_step(
        mesh, model=model, loss_fn=total, accumulate=100, accumulate_unsharded=unsharded
    )
    step((x, y, weight))

    (gradient,) = gradients_of(optimizer)
    assert (x.T @ y).min() > 256  # beyond what bfloat16 counts in ones
    np.testing.assert_array_equal(gradient, x.T @ y)


def test_a_parameter_shared_by_units_of_two_dtypes_cannot_be_gathered_once() -> None:
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    model = Model()
    fully_shard(model.blocks[0], mesh, mp_policy=MixedPrecisionPolicy(param_dtype=jnp.bfloat16))
    fully_shard(model.blocks[1], mesh)
    with pytest.raises(
        ParallelizeError, match="blocks.1 shares a parameter with another unit, but one computes"
    ):
        make_step(mesh, model=model, accumulate=2, accumulate_unsharded=True)
