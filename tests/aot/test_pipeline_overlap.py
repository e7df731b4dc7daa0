"""A schedule as one program, compiled for H100s that are not here: 4 pipeline ranks of 16 devices, and 16 of 256.

    tick   |     F: gathers, a block     |  B: gathers, a block, reduce-scatters  |
           |---- gradients to rank - 1 --|---- activations to rank + 1 -----------|

Measured on jax 0.10.2: both messages of a tick are asynchronous and have matmuls between start and done. XLA must be let to
have enough collectives under way at once: it counts those of a stage (gathers, reduce-scatters, sums), and ends a message
before the stage begins if there is no room for one more. With a limit of 3 that is so for fsdp and one block in a stage, with 4
for fsdp, tp and one block; with 16 for fsdp, tp and four. What else overlaps does not change with the limit.

51.9 B parameters on 4,096 devices: 16 stages, three stages' programs. With 64 layers of width 8,192 (four in a stage) it is the
same, and 0.64 of the gathers' and 0.67 of the reduce-scatters' bytes travel under matmuls.
"""

import functools
import math
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
from jaxpar.tp import cross_entropy, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from remat_model import Model, Transformer, TransformerConfig, loss_fn

from parallel import tensor_parallel_plan

pytestmark = pytest.mark.skipif(
    not has_gpu_compiler(), reason="needs XLA's GPU compiler, which needs no GPU: pip install 'jaxpar[aot]'"
)
POLICY = MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)


def sizes(width: int, depth: int, hidden: int, vocab: int) -> TransformerConfig:
    heads = width // 128
    return TransformerConfig(
        vocab=vocab,
        width=width,
        depth=depth,
        heads=heads,
        kv_heads=heads,
        hidden=hidden,
        dtype=jnp.bfloat16,
    )


def lowered_schedule(
    config: TransformerConfig, mesh: DeviceMesh, n_microbatches: int, length: int
) -> jax.stages.Lowered:
    """A block on each rank, one sequence in each microbatch of a device."""
    model = nnx.eval_shape(lambda: Model(config))
    if "tp" in mesh.axis_names:
        parallelize_module(model, mesh["tp"], tensor_parallel_plan(config))
    shard = functools.partial(fully_shard, mesh=mesh["dp"], mp_policy=POLICY)
    for unit in (model.embed, *model.blocks, [model.norm, model.head]):
        shard(unit)
    shard(model)
    pipeline(model, mesh["pp"], schedule="LockStep1F1B", n_microbatches=n_microbatches, executor="spmd")
    optimizer = nnx.eval_shape(lambda model: nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param), model)
    loss = vocabulary_parallel_loss if "tp" in mesh.axis_names else loss_fn
    step = jaxpar.TrainStep(loss, model, optimizer, mesh=mesh, batch_axes="dp")
    return step.lower(jax.ShapeDtypeStruct((mesh.size("dp") * n_microbatches, length + 1), jnp.int32))


def vocabulary_parallel_loss(model: Transformer, tokens: jax.Array) -> jax.Array:
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], "tp")


def assert_messages_travel_under_matmuls(
    compiled: Any, mesh: DeviceMesh, num_ticks: int, nbytes: int
) -> None:
    table, report = collectives(compiled, mesh=mesh), overlap(compiled, mesh=mesh)
    assert table.count(axis="pp") == table.count("collective_permute", "pp") == 2 * num_ticks
    assert table.bytes("collective_permute", "pp") == 2 * num_ticks * nbytes
    messages = report.select("collective_permute")
    assert messages.async_fraction == messages.overlapped_fraction == 1.0
    # Stages gather where they compute: no weight is gathered outside of the loop and kept there.
    assert all("loop" in row.where for row in table.rows)


def test_messages_travel_under_matmuls_both_ways(compile_for_gpu: Callable[..., Any]) -> None:
    pp, dp, microbatches, length = 4, 16, 8, 512
    mesh = jaxpar.init_device_mesh((pp, dp), ("pp", "dp"), devices=topology("h100", num_devices=pp * dp))
    config = sizes(width=512, depth=pp, hidden=2048, vocab=2048)
    compiled = compile_for_gpu(lowered_schedule(config, mesh, microbatches, length))
    assert_messages_travel_under_matmuls(compiled, mesh, microbatches + 2 * pp - 1, 2 * length * config.width)
    # Parameters and sums of gradients, of all ranks.
    assert memory(compiled).argument_bytes < 4 * num_params(config) / dp * 2


def test_52_billion_parameters_on_4096_devices(compile_for_gpu: Callable[..., Any]) -> None:
    """pp 16 x fsdp 32 x tp 8. The program holds three stages (first, inner, last), forward and backward, not sixteen."""
    shape, microbatches, length = (16, 32, 8), 64, 2048
    mesh = jaxpar.init_device_mesh(
        shape, ("pp", "dp", "tp"), devices=topology("h100", num_devices=math.prod(shape))
    )
    config = sizes(width=16384, depth=16, hidden=42752, vocab=32768)
    assert 51.8e9 < num_params(config) < 51.9e9
    compiled = compile_for_gpu(lowered_schedule(config, mesh, microbatches, length))
    assert_messages_travel_under_matmuls(
        compiled, mesh, microbatches + 2 * shape[0] - 1, 2 * length * config.width
    )
    assert memory(compiled).total_bytes < 80e9
    num_reductions = collectives(compiled, mesh=mesh).count("reduce_scatter", "dp")
    assert num_reductions < shape[0] * (
        microbatches + 2 * shape[0] - 1
    )  # not even one for each stage in a tick


def num_params(config: TransformerConfig) -> int:
    block = 4 * config.width**2 + 3 * config.width * config.hidden + 2 * config.width
    return config.width * (2 * config.vocab + 1) + config.depth * block
