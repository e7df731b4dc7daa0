"""A schedule as one program, compiled for 64 H100s that are not here: 4 pipeline ranks of 16 devices, fully sharded stages.

    tick   |     F: gathers, a block     |  B: gathers, a block, reduce-scatters  |
           |---- gradients to rank - 1 --|---- activations to rank + 1 -----------|

Measured on jax 0.10.2: both messages of a tick are asynchronous and have matmuls between start and done. They need XLA to let
three collectives be under way at once; with 2 (as a step without pipeline has it) one of them travels alone, with 1 both.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.debug import collectives, memory, overlap, topology
from jaxpar.debug._topology import has_gpu_compiler
from jaxpar.fsdp import MixedPrecisionPolicy, fully_shard
from jaxpar.mesh import DeviceMesh
from jaxpar.pp import pipeline

sys.path.insert(0, str(Path(__file__).parent))
from remat_model import Model, TransformerConfig, loss_fn

pytestmark = pytest.mark.skipif(
    not has_gpu_compiler(), reason="needs XLA's GPU compiler, which needs no GPU: pip install 'jaxpar[aot]'"
)
PP, DP, MICROBATCHES = 4, 16, 8
WIDTH, HIDDEN, VOCAB, LENGTH = 512, 2048, 2048, 512
POLICY = MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)


def lowered_schedule(mesh: DeviceMesh) -> jax.stages.Lowered:
    """A block on each rank, one sequence in each microbatch of a device."""
    config = TransformerConfig(
        vocab=VOCAB, width=WIDTH, depth=PP, heads=4, kv_heads=4, hidden=HIDDEN, dtype=jnp.bfloat16
    )
    model = nnx.eval_shape(lambda: Model(config))
    shard = functools.partial(fully_shard, mesh=mesh["dp"], mp_policy=POLICY)
    for unit in (model.embed, *model.blocks, [model.norm, model.head]):
        shard(unit)
    shard(model)
    pipeline(model, mesh["pp"], schedule="LockStep1F1B", n_microbatches=MICROBATCHES, executor="spmd")
    optimizer = nnx.eval_shape(lambda model: nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param), model)
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, batch_axes="dp")
    return step.lower(jax.ShapeDtypeStruct((DP * MICROBATCHES, LENGTH + 1), jnp.int32))


def test_messages_travel_under_matmuls_both_ways(compile_for_gpu: Callable[..., Any]) -> None:
    mesh = jaxpar.init_device_mesh((PP, DP), ("pp", "dp"), devices=topology("h100", num_devices=PP * DP))
    compiled = compile_for_gpu(lowered_schedule(mesh))
    table, report = collectives(compiled, mesh=mesh), overlap(compiled, mesh=mesh)
    num_ticks = MICROBATCHES + 2 * PP - 1
    assert table.count(axis="pp") == table.count("collective_permute", "pp") == 2 * num_ticks
    assert table.bytes("collective_permute", "pp") == 2 * num_ticks * 2 * LENGTH * WIDTH  # bfloat16
    messages = report.select("collective_permute")
    assert messages.async_fraction == messages.overlapped_fraction == 1.0
    # Stages gather where they compute: no weight is gathered outside of the loop and kept there.
    assert all("loop" in row.where for row in table.rows)
    sharded = WIDTH * (2 * VOCAB + 1) + PP * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN + 2 * WIDTH)
    assert (
        memory(compiled).argument_bytes < 4 * sharded / DP * 2
    )  # parameters and sums of gradients, of all ranks
