"""What a unit promises: how many collectives of how many bytes, whichever way its modules are written and wrapped."""

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
from jaxpar.debug import assert_collectives, collectives
from jaxpar.fsdp import MixedPrecisionPolicy, fully_shard
from jaxpar.mesh import DeviceMesh, init_device_mesh

WIDTH = 16
RTOL = 1e-5
Parallelize = Callable[[Any, DeviceMesh], Any]


class Block(nnx.Module):
    """x + down(act(up(norm(x)))): two kernels, a bias, a scale."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, depth: int = 2) -> None:
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(8, WIDTH, use_bias=False, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(depth)])
        self.outer = nnx.Linear(WIDTH, 8, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.outer(x)


BLOCK_BYTES = 4 * (2 * 2 * WIDTH * WIDTH + 2 * WIDTH)
ROOT_BYTES = 4 * (2 * 8 * WIDTH)
LOSS_BYTES = 4


def loss_fn(model: nnx.Module, batch: dict[str, Any]) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


@functools.cache
def batch(rows: int = 24) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(rows, 8)).astype(np.float32) for name in ("x", "y")}


def by_blocks(model: Model, mesh: DeviceMesh, **options: Any) -> None:
    fully_shard(model, mesh, units="blocks.*", **options)


def make_step(
    make_model: Callable[[], nnx.Module],
    parallelize: Parallelize,
    mesh: DeviceMesh,
    *,
    loss: Callable[..., Any] = loss_fn,
    **options: Any,
) -> tuple[Any, jaxpar.TrainStep]:
    model = make_model()
    parallelize(model, mesh)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return model, jaxpar.TrainStep(loss, model, optimizer, mesh=mesh, batch_axes=mesh.axis_names, **options)


def one_device_run(
    make_model: Callable[[], nnx.Module], loss: Callable[..., Any] = loss_fn, steps: int = 2
) -> tuple[list[float], list[np.ndarray]]:
    """Plain Flax and optax: losses, and the parameters after."""
    model = make_model()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, data: Any) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda m: loss(m, data))(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer, batch())) for _ in range(steps)]
    return losses, [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


def check_equal(step: jaxpar.TrainStep, model: nnx.Module, reference: tuple[list[float], Any]) -> None:
    losses = [float(step(batch())["loss"]) for _ in reference[0]]
    np.testing.assert_allclose(losses, reference[0], rtol=RTOL)
    ours = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    for a, b in zip(ours, reference[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL)


def dp(size: int) -> DeviceMesh:
    return init_device_mesh((size,), ("dp",), devices=jax.devices()[:size])


# Counts and bytes, from the compiled program.


@pytest.mark.parametrize("size", [2, 8])
def test_resharding_unit_gathers_twice_and_scatters_once(size: int) -> None:
    _, step = make_step(Model, by_blocks, dp(size))
    assert_collectives(
        step,
        batch(),
        mesh=dp(size),
        expected={("all_gather", "dp"): 2 * 2 + 1, ("reduce_scatter", "dp"): 3, ("all_reduce", "dp"): 1},
        bytes={
            "all_gather": 2 * 2 * BLOCK_BYTES + ROOT_BYTES,
            "reduce_scatter": 2 * BLOCK_BYTES + ROOT_BYTES,
            "all_reduce": LOSS_BYTES,
        },
    )


def test_keeping_unit_gathers_once() -> None:
    _, step = make_step(Model, functools.partial(by_blocks, reshard_after_forward=False), dp(4))
    assert_collectives(
        step,
        batch(),
        mesh=dp(4),
        expected={("all_gather", "dp"): 3, ("reduce_scatter", "dp"): 3, ("all_reduce", "dp"): 1},
        bytes={"all_gather": 2 * BLOCK_BYTES + ROOT_BYTES},
    )


def test_large_leaves_travel_alone() -> None:
    """The kernels (2 KiB each) on their own, bias and scale in one flat buffer."""
    _, step = make_step(Model, functools.partial(by_blocks, flatten_below_bytes=1024), dp(2))
    assert_collectives(
        step,
        batch(),
        mesh=dp(2),
        expected={
            ("all_gather", "dp"): 2 * 2 * 3 + 1,
            ("reduce_scatter", "dp"): 2 * 3 + 1,
            ("all_reduce", "dp"): 1,
        },
    )


def test_hybrid_sharding_adds_all_reduces_of_the_shards_only() -> None:
    mesh = init_device_mesh((2, 4), ("replica", "shard"))
    model, step = make_step(Model, by_blocks, mesh)
    table = collectives(step, batch(), mesh=mesh)
    assert table.count("reduce_scatter", "shard") == 3
    assert table.count("all_gather", "shard") == 5
    assert table.bytes("all_reduce", "replica") == (2 * BLOCK_BYTES + ROOT_BYTES) // 4
    check_equal(step, model, one_device_run(Model))


def test_keeping_over_an_inner_axis_gathers_again_there_only() -> None:
    mesh = init_device_mesh((2, 4), ("outer", "inner"))
    options = {"shard_axis": ("outer", "inner"), "reshard_after_forward": 4}
    model, step = make_step(Model, functools.partial(by_blocks, **options), mesh)
    table = collectives(step, batch(), mesh=mesh)
    assert table.count("all_gather", ("outer", "inner")) == 3
    assert table.count("all_gather", "inner") == 3
    check_equal(step, model, one_device_run(Model))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_halves_the_gathered_bytes_and_keeps_master_weights(dtype: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=jnp.float32, output_dtype=jnp.float32)
    model, step = make_step(Model, functools.partial(by_blocks, mp_policy=policy), dp(2))
    table = collectives(step, batch(), mesh=dp(2))
    assert table.bytes("all_gather") == (2 * 2 * BLOCK_BYTES + ROOT_BYTES) // 2
    assert table.bytes("reduce_scatter") == 2 * BLOCK_BYTES + ROOT_BYTES
    reference, _ = one_device_run(Model)
    losses = [float(step(batch())["loss"]) for _ in reference]
    np.testing.assert_allclose(losses, reference, rtol=1e-2)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(jnp.float32)}


# Any way to wrap, any way to write a module.


def children_first(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh)
    fully_shard(model, mesh)


def root_first(model: Model, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh)


def test_the_order_of_calls_does_not_matter() -> None:
    programs = []
    for parallelize in (children_first, root_first, by_blocks):
        _, step = make_step(Model, parallelize, dp(2))
        programs.append(step.lower(batch()).as_text())
    assert programs[0] == programs[1] == programs[2]


def test_nested_units_that_reshard_equal_one_device() -> None:
    def parallelize(model: Model, mesh: DeviceMesh) -> None:
        for block in model.blocks:
            fully_shard(block.down, mesh)
            fully_shard(block, mesh, reshard_after_forward=True)
        fully_shard(model, mesh, reshard_after_forward=True)

    model, step = make_step(Model, parallelize, dp(4))
    check_equal(step, model, one_device_run(Model))


def test_modules_of_one_unit_are_gathered_together() -> None:
    def parallelize(model: Model, mesh: DeviceMesh) -> None:
        fully_shard([model.inner, model.blocks[0]], mesh)
        fully_shard(model, mesh)

    model, step = make_step(Model, parallelize, dp(2))
    # Forward the list and the root; backward each module of the list its own part, and the first layer needs none.
    assert_collectives(
        step,
        batch(),
        mesh=dp(2),
        expected={("all_gather", "dp"): 2 + 1, ("reduce_scatter", "dp"): 2, ("all_reduce", "dp"): 1},
    )
    check_equal(step, model, one_device_run(Model))
