"""Faults that users of sharded training reported in public (FSDP-1 to FSDP-3), restated as small inputs."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.fsdp import full_state, fully_shard, load_full_state, sharding_report
from jaxpar.mesh import init_device_mesh

ROWS = 8


def mesh_of(num: int) -> Any:
    return init_device_mesh((num,), ("dp",), devices=jax.devices()[:num])


def batch(width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(ROWS, width)).astype(np.float32) for name in ("x", "y")}


def train_on_one_device(
    model: nnx.Module,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., jax.Array],
    data: Any,
    *,
    num_steps: int,
    wrt: Any = nnx.Param,
    max_norm: float = math.inf,
) -> tuple[nnx.Optimizer, list[float]]:
    """The same training in plain Flax; returns the optimizer and the norms of the gradients."""
    optimizer, norms = nnx.Optimizer(model, tx, wrt=wrt), []
    update = nnx.jit(
        lambda optimizer, model, grads: optimizer.update(model, grads)
    )  # fused as in a step: bf16
    for _ in range(num_steps):
        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, data)
        norms.append(
            math.sqrt(sum(float((g.astype(jnp.float32) ** 2).sum()) for g in jax.tree.leaves(grads)))
        )
        scale = min(1.0, max_norm / (norms[-1] + 1e-6))
        update(optimizer, model, jax.tree.map(lambda g, scale=scale: (g * scale).astype(g.dtype), grads))
    return optimizer, norms


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert (x.shape, x.dtype) == (expected[name].shape, expected[name].dtype), name
        np.testing.assert_allclose(
            x.astype(np.float64),
            expected[name].astype(np.float64),
            err_msg=name,
            **(tolerance or {"rtol": 1e-5, "atol": 1e-7}),
        )


# FSDP-1: a parameter without dims.


class Gated(nnx.Module):
    def __init__(self) -> None:
        self.t = nnx.Param(jnp.float32(0.5))
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.t[...] * self.linear(x)


def squared_error(model: Any, data: Any) -> jax.Array:
    return ((model(data["x"]) - data["y"]) ** 2).mean()


def test_fsdp_1_a_scalar_stays_a_scalar(tmp_path: Any) -> None:
    model, one = fully_shard(Gated(), mesh_of(4)), Gated()
    assert (model.t.get_value().shape, model.t.get_value().sharding.is_fully_replicated) == ((), True)
    (row,) = (row for row in sharding_report(model).rows if row.name == "t")
    assert (row.shape, row.num_parts, row.reason) == ((), 1, "a scalar has no dim")
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    step = jaxpar.TrainStep(squared_error, model, optimizer, mesh=mesh_of(4), clip_norm=1e9)
    norm = float(step(batch(4))["grad_norm"])
    expected, norms = train_on_one_device(
        one, optax.sgd(0.1, momentum=0.9), squared_error, batch(4), num_steps=1
    )
    np.testing.assert_allclose(norm, norms[0], rtol=1e-5)  # counted once
    assert_close(full_state(model), full_state(one))
    assert_close(full_state(optimizer), full_state(expected))

    np.savez(tmp_path / "state.npz", **full_state(model))
    again = fully_shard(Gated(), mesh_of(2))
    with np.load(tmp_path / "state.npz") as saved:
        load_full_state(again, saved)
    assert again.t.get_value().shape == ()
    np.testing.assert_array_equal(again.t[...], model.t[...])
    np.testing.assert_array_equal(again.linear.kernel[...], model.linear.kernel[...])


# FSDP-2: shapes that divide by nothing.


class Weight(nnx.Module):
    def __init__(self, shape: tuple[int, int]) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(0), shape))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.w[...]) @ self.w[...].T


@pytest.mark.parametrize(
    ("shape", "num_ranks", "is_flat"),
    [((5, 3), 4, True), ((2, 6), 8, True), ((5, 4), 4, False), ((2, 8), 8, False), ((5, 3), 1, False)],
)
def test_fsdp_2_padding_never_shows(shape: tuple[int, int], num_ranks: int, is_flat: bool) -> None:
    mesh, size = mesh_of(num_ranks), math.prod(shape)
    model = jaxpar.init_sharded(lambda: Weight(shape), lambda m: fully_shard(m, mesh, pad_above_bytes=0))
    one = Weight(shape)
    np.testing.assert_array_equal(full_state(model)["w"], one.w[...])
    report = sharding_report(model)
    assert (report.rows[0].is_flat, report.rows[0].shape, report.num_parameters) == (is_flat, shape, size)
    assert {x.data.size for x in model.w.get_value().addressable_shards} == {-(-size // num_ranks)}

    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(squared_error, model, optimizer, mesh=mesh, clip_norm=0.1)
    norm = float(step(batch(shape[0]))["grad_norm"])
    reference, norms = train_on_one_device(
        one, optax.adam(0.1), squared_error, batch(shape[0]), num_steps=1, max_norm=0.1
    )
    assert norms[0] > 0.1  # it is clipped
    np.testing.assert_allclose(norm, norms[0], rtol=1e-5)
    state = {"model": full_state(model), "optimizer": full_state(optimizer)}
    assert_close(state["model"], full_state(one))
    assert_close(state["optimizer"], full_state(reference))
    assert state["optimizer"]["opt_state.0.mu.w"].shape == shape

    for other in (2, 3):
        again = fully_shard(Weight(shape), mesh_of(other), pad_above_bytes=0)
        follows = nnx.Optimizer(again, optax.adam(0.1), wrt=nnx.Param)
        assert again.w.get_value().sharding.num_devices == other
        assert not again.w.get_value().sharding.is_fully_replicated
        for module, saved in ((again, state["model"]), (follows, state["optimizer"])):
            load_full_state(module, saved)
            assert_close(full_state(module), saved, rtol=0, atol=0)


def test_fsdp_2_a_padded_parameter_stays_exact_over_many_steps() -> None:
    """What Adam makes of the padding (whose gradient is zero) never reaches the parameter."""
    model = fully_shard(Weight((5, 3)), mesh_of(4), pad_above_bytes=0)
    optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(squared_error, model, optimizer, mesh=mesh_of(4), clip_norm=0.1)
    for _ in range(5):
        step(batch(5))
    np.testing.assert_array_equal(np.asarray(model.w.get_value())[15:], 0)
    one = Weight((5, 3))
    train_on_one_device(one, optax.adamw(0.1), squared_error, batch(5), num_steps=5, max_norm=0.1)
    assert_close(full_state(model), full_state(one))


def test_fsdp_2_a_vocabulary_of_32001_rows_is_shared_by_8() -> None:
    class Vocabulary(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(32001, 63, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.embed(x)

    model = fully_shard(nnx.eval_shape(Vocabulary), mesh_of(8))
    (row,) = sharding_report(model).rows
    assert (row.shape, row.size, row.is_flat, row.num_parts) == ((32001, 63), 32001 * 63, True, 8)
    assert row.bytes_per_device == 4 * -(-32001 * 63 // 8)
    assert model.embed.embedding.get_value().sharding.shard_shape((row.stored_bytes // 4,)) == (252008,)

    # A width that divides is shared instead: nothing is padded.
    class Wide(Vocabulary):
        def __init__(self) -> None:
            self.embed = nnx.Embed(32001, 64, rngs=nnx.Rngs(0))

    (row,) = sharding_report(fully_shard(nnx.eval_shape(Wide), mesh_of(8))).rows
    assert (row.is_flat, row.stored_bytes, row.bytes_per_device) == (False, 32001 * 64 * 4, 32001 * 8 * 4)


# FSDP-3: dtypes and frozen parameters mixed in one unit.


class Frozen(nnx.Param):
    """A parameter that is not trained."""


TRAINED = nnx.All(nnx.Param, nnx.Not(Frozen))


class Mixed(nnx.Module):
    """Linear in every parameter, integers in all that gradients are made of: they are exact in bf16, in any order."""

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), 2)
        self.a = nnx.Param(jax.random.normal(keys[0], (8, 8), jnp.bfloat16))
        self.b = nnx.Param(jax.random.normal(keys[1], (8, 4)))
        self.c = Frozen(jnp.arange(32.0).reshape(4, 8) % 5 - 2)
        self.d = Frozen(jnp.arange(8, dtype=jnp.int32)[::-1].reshape(8, 1))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x[:, self.d[...][:, 0]]
        h = (x.astype(jnp.bfloat16) @ self.a[...]).astype(jnp.float32)
        return h + x @ self.b[...] @ self.c[...]


def inner_product(model: Any, data: Any) -> jax.Array:
    return (model(data["x"]) * data["y"]).sum(1).mean()


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_fsdp_3_dtypes_and_frozen_parameters_share_a_unit(reshard_after_forward: bool) -> None:
    mesh, tx = mesh_of(4), optax.adamw(1e-2, weight_decay=0.1)
    rows = np.arange(ROWS * 8, dtype=np.float32).reshape(ROWS, 8)
    data = {"x": np.eye(8, dtype=np.float32)[[3, 1, 4, 0, 5, 7, 2, 6]], "y": rows % 7 - 3}
    model, one = fully_shard(Mixed(), mesh, reshard_after_forward=reshard_after_forward), Mixed()
    assert all(row.num_parts == 4 for row in sharding_report(model).rows)
    before = full_state(model)
    optimizer = nnx.Optimizer(model, tx, wrt=TRAINED)
    step = jaxpar.TrainStep(inner_product, model, optimizer, mesh=mesh, clip_norm=1e9)
    norms = [float(step(data)["grad_norm"]) for _ in range(3)]
    reference, expected = train_on_one_device(one, tx, inner_product, data, num_steps=3, wrt=TRAINED)

    after, on_one = full_state(model), full_state(one)
    dtypes = {"a": "bfloat16", "b": "float32", "c": "float32", "d": "int32"}
    assert {name: str(x.dtype) for name, x in after.items()} == dtypes
    for name in ("c", "d"):
        np.testing.assert_array_equal(after[name], before[name])  # no decay either
    np.testing.assert_allclose(norms, expected, rtol=1e-6)
    assert_close({"a": after["a"]}, {"a": on_one["a"]}, rtol=2**-8, atol=0)
    assert_close({"b": after["b"]}, {"b": on_one["b"]}, rtol=1e-6, atol=1e-7)
    assert all(np.abs(after[x] - before[x]).astype(np.float32).max() > 0.02 for x in "ab")

    state = full_state(optimizer)
    assert state.keys() == full_state(reference).keys()
    assert not [name for name in state if name.split(".")[-1] in ("c", "d")]
    again = fully_shard(Mixed(), mesh_of(2))
    load_full_state(again, after)
    assert_close(full_state(again), after, rtol=0, atol=0)
