"""jaxpar's hybrid sharded step, compiled for 256 TPU v5e chips that are not here.

    torus 16 x 16, mesh (dp_replicate=16, dp_shard=16)    gradients: reduce-scatter along a ring, then all-reduce of shards
    torus 16 x 16, mesh (dp=256)                          XLA:TPU makes every reduce-scatter and all-gather an all-reduce

The model is small: what is asked is which collectives XLA:TPU makes, and that the program fits. It takes half a minute a
program and a compiler of 213 MB, so it runs only where `jaxpar[aot-tpu]` is installed.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.debug import CollectiveTable, collectives, memory, topology
from jaxpar.debug._torus import has_tpu_compiler
from jaxpar.fsdp import MixedPrecisionPolicy, fully_shard
from jaxpar.mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from transformer import Transformer, TransformerConfig, loss_fn

pytestmark = pytest.mark.skipif(
    not has_tpu_compiler(),
    reason="needs XLA's TPU compiler, which needs no TPU: pip install 'jaxpar[aot-tpu]'",
)
CONFIG = TransformerConfig(
    vocab=1024, width=256, depth=1, heads=8, kv_heads=8, hidden=1024, dtype=jnp.bfloat16
)
POLICY = MixedPrecisionPolicy(param_dtype=jnp.bfloat16, reduce_dtype=jnp.float32)
HBM_BYTES = 16 << 30
# Continuation fusions print a collective several times, so they cannot be counted.
OPTIONS = {"xla_tpu_enable_async_collective_fusion": False}


def compiled_step(mesh: DeviceMesh) -> tuple[CollectiveTable, jax.stages.Compiled, int]:
    """The step's collectives, the step, and the number of the parameters."""
    model = nnx.eval_shape(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)))
    for unit in (model.embed, *model.blocks, model.head, model):
        fully_shard(unit, mesh, mp_policy=POLICY)
    optimizer = nnx.eval_shape(lambda model: nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param), model)
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, batch_axes=mesh.axis_names)
    tokens = jax.ShapeDtypeStruct((2 * 256, 257), jnp.int32)
    compiled = step.lower(tokens).compile(compiler_options=OPTIONS)
    size = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return collectives(compiled, mesh=mesh), compiled, size


def test_along_one_dim_of_the_torus_gradients_are_reduce_scattered() -> None:
    devices = topology("v5e", num_devices=256)
    mesh = jaxpar.init_device_mesh((16, 16), ("dp_replicate", "dp_shard"), devices=devices)
    table, compiled, size = compiled_step(mesh)
    # Scales of norms are too small: XLA:TPU makes their reduce-scatter an all-reduce.
    assert table.bytes("reduce_scatter", "dp_shard") == pytest.approx(4 * size, rel=0.01)
    assert table.bytes("all_reduce", "dp_shard") <= 0.01 * 4 * size
    assert table.bytes("all_reduce", "dp_replicate") == pytest.approx(4 * size / 16, rel=0.01)
    use = memory(compiled)
    assert use.argument_bytes <= 1.1 * 3 * 4 * size / 16  # parameters and two moments, and padding of tiles
    assert use.total_bytes < HBM_BYTES


def test_over_the_flattened_torus_they_are_all_reduced() -> None:
    mesh = jaxpar.init_device_mesh((256,), ("dp",), devices=topology("v5e", num_devices=256))
    table, _, size = compiled_step(mesh)
    assert table.count("reduce_scatter") == 0
    assert table.bytes("all_reduce", "dp") >= 4 * size
