"""Bytes per device: 1/n of parameters, optimizer state and gradients, and one unit's parameters at a time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.debug import MemoryUse, memory
from jaxpar.fsdp import fully_shard, sharding_report
from jaxpar.mesh import init_device_mesh

WIDTH, RANKS = 128, 8
BLOCK_BYTES = 4 * WIDTH * WIDTH
MESH = init_device_mesh((RANKS,), ("dp",))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(x))


class Deep(nnx.Module):
    def __init__(self, depth: int) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(depth)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model: nnx.Module, batch: jax.Array) -> jax.Array:
    return (model(batch) ** 2).mean()


def step_of(depth: int, **options: Any) -> tuple[Deep, nnx.Optimizer, jaxpar.TrainStep]:
    model = jaxpar.init_sharded(
        lambda: Deep(depth), lambda m: fully_shard(m, MESH, units="blocks.*", **options)
    )
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    return model, optimizer, jaxpar.TrainStep(loss_fn, model, optimizer, mesh=MESH)


@functools.cache
def use_of(depth: int, reshard: bool) -> MemoryUse:
    _, _, step = step_of(depth, reshard_after_forward=reshard)
    return memory(step.lower(np.ones((RANKS, WIDTH), np.float32)).compile())


def bytes_on_each_device(*modules: nnx.Pytree) -> set[int]:
    totals = dict.fromkeys(jax.devices(), 0)
    for x in (leaf for module in modules for leaf in jax.tree.leaves(nnx.state(module))):
        for shard in x.addressable_shards:
            totals[shard.device] += shard.data.nbytes
    return set(totals.values())


def test_parameters_and_optimizer_state_are_cut_evenly() -> None:
    model, optimizer, _ = step_of(4)
    assert bytes_on_each_device(model) == {4 * BLOCK_BYTES // RANKS}
    assert sharding_report(model).bytes_per_device == 4 * BLOCK_BYTES // RANKS
    counts = 2 * 4  # the optimizer's two step counters
    assert bytes_on_each_device(optimizer) == {2 * 4 * BLOCK_BYTES // RANKS + counts}


def test_arguments_and_results_of_a_step_are_the_shards() -> None:
    use = use_of(4, True)
    state = 3 * 4 * BLOCK_BYTES // RANKS
    assert state <= use.argument_bytes <= state + 4 * WIDTH + 64  # and this device's row of the batch
    assert use.alias_bytes >= state


def test_the_peak_grows_with_one_unit_and_not_with_depth() -> None:
    """What each block adds: two rows of activations (1 KiB), not its gathered weight (64 KiB) nor a shard (8 KiB)."""
    by_depth = {
        reshard: (use_of(deep, reshard).temp_bytes - use_of(flat, reshard).temp_bytes) / (deep - flat)
        for reshard, flat, deep in ((True, 8, 12), (False, 4, 6))
    }
    assert by_depth[True] <= 2 * 4 * WIDTH
    assert by_depth[False] >= BLOCK_BYTES
    assert use_of(12, True).temp_bytes <= 3 * BLOCK_BYTES


def test_a_model_larger_than_a_device_may_hold_initialises_and_trains() -> None:
    limit_bytes = 1 << 20
    model, optimizer, step = step_of(16)
    full = sum(x.nbytes for x in jax.tree.leaves(nnx.state((model, optimizer))))
    assert full > 3 * limit_bytes
    compiled = step.lower(np.ones((RANKS, WIDTH), np.float32)).compile()
    assert memory(compiled).total_bytes < limit_bytes
    losses = [float(step(np.ones((RANKS, WIDTH), np.float32))["loss"]) for _ in range(3)]
    assert losses[2] < losses[0]
    assert max(bytes_on_each_device(model, optimizer)) < limit_bytes
