"""Optimizer state lies as its parameters do, if the optimizer is built after `fully_shard`; otherwise an early error."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar._errors import ParallelizeError
from jaxpar.fsdp import fully_shard
from jaxpar.fsdp._follows import check_optimizer_follows
from jaxpar.mesh import init_device_mesh


class Model(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        self.odd = nnx.Param(jnp.ones((5, 3)))
        self.gate = nnx.Param(jnp.float32(0.5))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def mesh(*sizes: int) -> Any:
    num = int(np.prod(sizes))
    return init_device_mesh(sizes, ("replica", "dp")[-len(sizes) :], devices=jax.devices()[:num])


def make(*sizes: int) -> Model:
    return fully_shard(Model(), mesh(*sizes), pad_above_bytes=0)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "momentum": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=2),
    "masked": lambda: optax.masked(optax.adam(1e-3), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
}


@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 2)])
def test_moments_are_sharded_exactly_like_their_parameters(sizes: tuple[int, ...]) -> None:
    model = make(*sizes)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    parameters = nnx.to_flat_state(nnx.state(model, nnx.Param))
    assert len(parameters) == 4
    for moments in (optimizer.opt_state[0].mu, optimizer.opt_state[0].nu):
        found = dict(nnx.to_flat_state(nnx.state(moments)))
        for path, parameter in parameters:
            if parameter.get_value().ndim:
                assert found[path].get_value().sharding == parameter.get_value().sharding, path
            assert found[path].get_value().shape == parameter.get_value().shape, path
    check_optimizer_follows(model, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_built_after_follows(name: str) -> None:
    model = make(4)
    check_optimizer_follows(model, nnx.Optimizer(model, OPTIMIZERS[name](), wrt=nnx.Param))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_built_before_is_an_error(name: str) -> None:
    model = Model()
    optimizer = nnx.Optimizer(model, OPTIMIZERS[name](), wrt=nnx.Param)
    check_optimizer_follows(model, optimizer)  # nothing is sharded
    fully_shard(model, mesh(4), pad_above_bytes=0)
    text = r"the optimizer was built before fully_shard: opt_state\.[\w.]*linear\.\w+ has the shape \["
    with pytest.raises(ParallelizeError, match=text):
        check_optimizer_follows(model, optimizer)


def test_the_message_names_shapes_axes_and_the_lines_to_write() -> None:
    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=lambda path, x: "odd" in path)
    fully_shard(model, mesh(4), pad_above_bytes=0)
    text = (
        "opt_state.0.mu.odd has the shape [5, 3], while its parameter odd is [16] (flat and padded), sharded over ('dp',). "
        "Its state would stay whole on every device. Shard first, then build it: fully_shard(model, mesh), and after "
        "that optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)."
    )
    with pytest.raises(ParallelizeError, match=re.escape(text)):
        check_optimizer_follows(model, optimizer)


def test_state_of_a_part_sharded_later_is_an_error() -> None:
    model = Model()
    fully_shard(model.linear, mesh(4))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    check_optimizer_follows(model, optimizer)
    fully_shard(model, mesh(4), pad_above_bytes=0)
    with pytest.raises(ParallelizeError, match=r"built before fully_shard: opt_state\.0\.mu\.odd"):
        check_optimizer_follows(model, optimizer)


def test_state_that_was_put_elsewhere_is_an_error() -> None:
    model = make(4)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    moment = optimizer.opt_state[0].nu["linear"]["kernel"]
    whole = NamedSharding(mesh(4).jax_mesh, P())
    moment.set_value(jax.device_put(moment.get_value(), whole))
    with pytest.raises(
        ParallelizeError, match=r"opt_state\.0\.nu\.linear\.kernel belongs to the parameter linear\.kernel"
    ):
        check_optimizer_follows(model, optimizer)


def test_the_longest_name_decides_whose_state_it_is() -> None:
    inner, outer = nnx.Param(jnp.ones((8, 2))), nnx.Param(jnp.ones(3))
    model = nnx.Dict({"block": nnx.Dict({"w": inner}), "w": outer})
    fully_shard(Holder(model), mesh(4))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    check_optimizer_follows(model, optimizer)


class Holder(nnx.Module):
    def __init__(self, inner: nnx.Module) -> None:
        self.inner = inner

    def __call__(self, x: jax.Array) -> jax.Array:
        return x
