"""A sharded parameter that is read where no unit has gathered it is refused by name, in the first trace; with and without a pipeline."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.fsdp import fully_shard, register_fsdp_forward_method
from jaxpar.mesh import DeviceMesh, init_device_mesh
from jaxpar.pp import pipeline

TOKENS = np.arange(16, dtype=np.int32).reshape(8, 2) % 8


class Block(nnx.Module):
    """A unit inside a unit, whose parameter it reads itself."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.up.kernel[...]


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(8, 8, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x

    def _encoded(self, tokens: jax.Array) -> jax.Array:
        return self.embed(tokens)


def outside(model: Any, tokens: jax.Array) -> jax.Array:
    """The root gathers for the first term only."""
    return (model(tokens) ** 2).mean() + (model.embed(tokens) ** 2).mean()


def without_root(model: Any, tokens: jax.Array) -> jax.Array:
    """Nothing gathers the table."""
    x = model.embed(tokens)
    for block in model.blocks:
        x = x + block(x)
    return (x**2).mean()


def make_mesh(*, is_pipelined: bool) -> DeviceMesh:
    shape, names = ((2, 2), ("pp", "dp")) if is_pipelined else ((2,), ("dp",))
    return init_device_mesh(shape, names, devices=jax.devices()[: 2 * len(shape)])


def make_step(model: Any, mesh: DeviceMesh, loss: Any) -> jaxpar.TrainStep:
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return jaxpar.TrainStep(loss, model, optimizer, mesh=mesh, batch_axes="dp")


@pytest.mark.parametrize("is_pipelined", [False, True], ids=["fused", "pipelined"])
@pytest.mark.parametrize("loss", [outside, without_root])
def test_a_module_of_a_unit_that_is_called_outside_it(loss: Any, *, is_pipelined: bool) -> None:
    mesh = make_mesh(is_pipelined=is_pipelined)
    model = fully_shard(Model(), mesh["dp"], units="blocks.*")
    if is_pipelined:
        pipeline(model, mesh["pp"], n_stages=2, n_microbatches=2)
    message = (
        "embed.embedding is used outside a call of its unit, the model itself. There a device has no more than its part along dim "
        "0 over ('dp',), float32[4, 8]"
    )
    cure = (
        "If model.embed is called elsewhere, make it a unit of its own: fully_shard(model.embed, mesh['dp'])."
    )
    with pytest.raises(ParallelizeError, match=f"{re.escape(message)}.*{re.escape(cure)}"):
        make_step(model, mesh, loss)(TOKENS)


def test_what_the_message_says_to_write_is_right() -> None:
    mesh = make_mesh(is_pipelined=False)
    model = fully_shard(Model(), mesh["dp"], units=["embed", "blocks.*"])
    expected = outside(Model(), jnp.asarray(TOKENS))
    np.testing.assert_allclose(make_step(model, mesh, outside)(TOKENS)["loss"], expected, rtol=1e-6)


def test_a_private_method_is_registered() -> None:
    mesh = make_mesh(is_pipelined=False)
    model = fully_shard(Model(), mesh["dp"])
    step = make_step(model, mesh, lambda model, tokens: (model._encoded(tokens) ** 2).mean())
    with pytest.raises(
        ParallelizeError, match=r"embed\.embedding is used outside .*register_fsdp_forward_method"
    ):
        step.lower(TOKENS)
    register_fsdp_forward_method(model, "_encoded")
    make_step(model, mesh, lambda model, tokens: (model._encoded(tokens) ** 2).mean()).lower(TOKENS)


def test_within_a_unit_the_parameter_of_another_one_is_a_part_too() -> None:
    """The outer unit frees its parameters, so its code runs on copies of both: they are found by the outer one."""
    mesh = make_mesh(is_pipelined=False)
    model = Model()
    fully_shard(model, mesh["dp"], units="blocks.*.up", reshard_after_forward=True)
    step = make_step(model, mesh, outside)
    with pytest.raises(
        ParallelizeError, match=r"blocks\.0\.up\.kernel is used outside .* its unit, blocks\.0\.up\."
    ):
        step.lower(TOKENS)


def test_a_copy_has_no_name_and_is_refused_all_the_same() -> None:
    mesh = make_mesh(is_pipelined=False)
    model = fully_shard(Model(), mesh["dp"])
    remat = nnx.remat(lambda model, tokens: model.embed(tokens))
    step = make_step(model, mesh, lambda model, tokens: (remat(model, tokens) ** 2).mean())
    with pytest.raises(
        ParallelizeError, match=r"a parameter is used outside .* as within nnx\.remat.*float32\[4, 8\]"
    ):
        step.lower(TOKENS)


def test_dtypes_are_no_use() -> None:
    """Only values and shapes are; both are right inside."""
    mesh = make_mesh(is_pipelined=False)
    model = fully_shard(Model(), mesh["dp"])
    step = make_step(
        model, mesh, lambda model, tokens: model(tokens).astype(model.embed.embedding.dtype).mean()
    )
    step.lower(TOKENS)
    with pytest.raises(ParallelizeError, match=r"embed\.embedding is used outside"):
        make_step(
            model, mesh, lambda model, tokens: model(tokens).mean() / model.embed.embedding.shape[0]
        ).lower(TOKENS)
