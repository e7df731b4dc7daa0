"""Units of every kind of module: tied weights, state, arguments, methods, recomputation; equal to one device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.debug import collectives
from jaxpar.fsdp import fully_shard, register_fsdp_forward_method
from jaxpar.mesh import DeviceMesh, init_device_mesh

RTOL = 1e-5
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(8, 4, 8)).astype(np.float32),
    "tokens": RNG.integers(0, 16, (8, 4)).astype(np.int32),
    "y": RNG.normal(size=(8, 4, 8)).astype(np.float32),
}


def mesh_of(size: int) -> DeviceMesh:
    return init_device_mesh((size,), ("dp",), devices=jax.devices()[:size])


def check_equals_one_device(
    make_model: Callable[[], nnx.Module],
    loss: Callable[..., Any],
    parallelize: Callable[[Any, DeviceMesh], Any],
    *,
    size: int = 2,
    steps: int = 2,
) -> jaxpar.TrainStep:
    """Trains the model on `size` devices and plainly on one; losses, parameters and all other state are equal."""
    plain, model = make_model(), make_model()
    parallelize(model, mesh_of(size))
    optimizers = [nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param) for m in (plain, model)]

    @nnx.jit
    def one_device(model: nnx.Module, optimizer: nnx.Optimizer) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda m: loss(m, BATCH))(model)
        optimizer.update(model, grads)
        return value

    step = jaxpar.TrainStep(loss, model, optimizers[1], mesh=mesh_of(size))
    for _ in range(steps):
        expected = one_device(plain, optimizers[0])
        np.testing.assert_allclose(step(BATCH)["loss"], expected, rtol=RTOL)
    for (path, ours), (_, theirs) in zip(
        nnx.to_flat_state(nnx.state(model)), nnx.to_flat_state(nnx.state(plain)), strict=True
    ):
        a, b = ours.get_value(), theirs.get_value()
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL, err_msg=str(path))
    return step


# Tied weights.


class Tied(nnx.Module):
    """The embedding is the head too, by `attend` of a unit; a kernel is shared by two layers."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.first = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.second = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + jnp.tanh(self.second(jnp.tanh(self.first(x))))
        return self.embed.attend(x)


def tied_loss(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["tokens"]).mean()


@pytest.mark.parametrize("units", [(), ("embed",), ("embed", "first", "second")])
def test_tied_weights_are_sharded_once_and_both_uses_count(units: tuple[str, ...]) -> None:
    step = check_equals_one_device(Tied, tied_loss, lambda m, mesh: fully_shard(m, mesh, units=units))
    assert collectives(step, BATCH, mesh=mesh_of(2)).count("all_reduce") == 1


# State, arguments, outputs.


class Stateful(nnx.Module):
    """Counts its calls, and normalises by statistics of the whole batch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(
        self, x: jax.Array, scale: float, *, mask: jax.Array | None = None, extras: dict[str, Any]
    ) -> tuple[jax.Array, dict[str, Any]]:
        self.calls.set_value(self.calls.get_value() + 1)
        y = self.linear(x) * scale
        if mask is not None:
            y = jnp.where(mask, y, 0.0)
        return x + jnp.tanh(y), {"norm": (y * y).mean(), "name": "hidden", "n": extras["n"]}


class StatefulModel(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Stateful(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jnp.float32(0)
        mask = x > -1.0
        for block in self.blocks:
            x, info = block(x, 0.5, mask=mask, extras={"n": 3, "unused": None})
            assert info["name"] == "hidden" and info["n"] == 3
            total = total + info["norm"]
        return x, total


def stateful_loss(model: Any, batch: Any) -> jax.Array:
    y, total = model(batch["x"])
    return ((y - batch["y"]) ** 2).mean() + 0.1 * total


@pytest.mark.parametrize("reshard", [True, False])
def test_state_arguments_and_outputs_of_any_kind(reshard: bool) -> None:
    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        fully_shard(model, mesh, units="blocks.*", reshard_after_forward=reshard)

    check_equals_one_device(StatefulModel, stateful_loss, parallelize)


def test_dropout_in_a_unit_draws_the_same_masks_on_every_mesh() -> None:
    class Dropped(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.layers = nnx.List(
                [nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)) for _ in range(2)]
            )

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    losses = []
    for size in (1, 4):
        model = Dropped()
        fully_shard(model, mesh_of(size), units="layers.*")
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        step = jaxpar.TrainStep(
            lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(), model, optimizer, mesh=mesh_of(size)
        )
        losses.append([float(step(BATCH)["loss"]) for _ in range(3)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=RTOL)
    assert len(set(losses[0])) == 3


# Methods other than __call__, recomputation, loops.


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.encode(x) + x

    def encode(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.linear(x))

    def _late(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


class Encoders(nnx.Module):
    def __init__(self) -> None:
        self.encoder = Encoder(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.encoder._late(self.encoder.encode(self.encoder(x)))


def mse(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def shard_encoder(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model.encoder, mesh)
    register_fsdp_forward_method(model.encoder, "_late")


def test_public_and_registered_methods_gather_too() -> None:
    check_equals_one_device(Encoders, mse, shard_encoder)


class Remat(nnx.Module):
    """`nnx.remat` around a unit, and inside one."""

    def __init__(self, *, inside: bool) -> None:
        rngs = nnx.Rngs(0)
        self.inside = inside
        self.blocks = nnx.List([Encoder(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x) if self.inside else nnx.remat(lambda b, x: b(x))(block, x)
        return x


class RematInside(Encoder):
    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.remat(Encoder.__call__)(self, x)


def test_rematerialisation_around_a_unit() -> None:
    check_equals_one_device(
        lambda: Remat(inside=False), mse, lambda m, mesh: fully_shard(m, mesh, units="blocks.*")
    )


def test_rematerialisation_inside_a_unit_keeps_the_inputs_only() -> None:
    def make() -> Remat:
        model = Remat(inside=True)
        for block in model.blocks:
            block.__class__ = RematInside
        return model

    check_equals_one_device(make, mse, lambda m, mesh: fully_shard(m, mesh, units="blocks.*"))


class Stacked(nnx.Module):
    """Four layers with stacked parameters [4, ...], run by one loop; the layer is the unit."""

    def __init__(self) -> None:
        self.layers = nnx.split_rngs(splits=4)(nnx.vmap(Encoder))(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return run(self.layers, x)


def test_stacked_layers_in_a_loop_gather_one_layer_at_a_time() -> None:
    def parallelize(model: Any, mesh: DeviceMesh) -> None:
        fully_shard(model.layers, mesh, shard_dim_fn=lambda name, x: 1)
        fully_shard(model, mesh)

    step = check_equals_one_device(Stacked, mse, parallelize)
    table = collectives(step, BATCH, mesh=mesh_of(2))
    assert table.count("all_gather", "dp") == 2 * 4 and table.count("reduce_scatter", "dp") == 4
    assert table.bytes("all_gather", "dp") == 2 * 4 * 4 * (8 * 8 + 8)


def test_sharding_the_stacked_dim_is_a_named_error() -> None:
    model = Stacked()
    fully_shard(model.layers, mesh_of(2))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(mse, model, optimizer, mesh=mesh_of(2))
    with pytest.raises(ParallelizeError, match=r"stacked layer dim.*shard_dim_fn=lambda name, x: 1"):
        step(BATCH)


# The same object in global view, and in one's own shard_map.


def test_outside_a_step_the_model_is_the_plain_model() -> None:
    plain, model = Tied(), Tied()
    fully_shard(model, mesh_of(4), units="embed")
    np.testing.assert_allclose(model(BATCH["tokens"]), plain(BATCH["tokens"]), rtol=RTOL, atol=1e-6)
    jitted = nnx.jit(lambda m, tokens: m(tokens))
    np.testing.assert_allclose(jitted(model, BATCH["tokens"]), plain(BATCH["tokens"]), rtol=RTOL, atol=1e-6)


def test_gradients_in_ones_own_shard_map_are_summed_over_replicas_too() -> None:
    mesh = init_device_mesh((2, 2), ("replica", "shard"), devices=jax.devices()[:4])
    model = Encoders()
    shard_encoder(model, mesh)
    graphdef, state = nnx.split(model)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)
    rows = jax.sharding.PartitionSpec(("replica", "shard"))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh.jax_mesh, in_specs=(specs, rows), out_specs=specs)
    def gradients(state: Any, batch: Any) -> Any:
        return jax.grad(lambda s: mse(nnx.merge(graphdef, s), batch))(state)

    got = gradients(state, BATCH)
    expected = nnx.grad(mse)(Encoders(), BATCH)
    for ours, theirs in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(np.asarray(ours) / 4, theirs, rtol=RTOL, atol=1e-6)
    table = collectives(gradients, state, BATCH, mesh=mesh)
    assert table.count("reduce_scatter", "shard") == 3  # one for each of the three calls
    assert table.bytes("all_reduce", "replica") == 3 * 4 * (8 * 8 + 8) // 2


def test_a_parameter_shared_by_units_over_other_axes_is_a_named_error() -> None:
    mesh = init_device_mesh((2, 2), ("outer", "inner"), devices=jax.devices()[:4])
    model = Tied()
    fully_shard(model.first, mesh["inner"])
    fully_shard(model.second, mesh, shard_axis=("outer", "inner"))
    fully_shard(model, mesh["inner"])
    step = jaxpar.TrainStep(
        tied_loss,
        model,
        nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param),
        mesh=mesh,
        batch_axes=mesh.axis_names,
    )
    with pytest.raises(ParallelizeError, match=r"two units share a parameter.*Shard both over the same axes"):
        step(BATCH)
