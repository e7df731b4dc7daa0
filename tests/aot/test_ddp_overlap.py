"""jaxpar's data-parallel step, compiled for 64 and 4,096 H100s that are not here.

Every bucket is one asynchronous all-reduce, and all but the last (the embedding's, after which nothing is left to
compute) travel under a matrix product. The negative control is one bucket: its all-reduce waits for everything.
"""

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
from jaxpar.ddp import DistributedDataParallel
from jaxpar.debug import collectives, overlap, topology
from jaxpar.debug._topology import has_gpu_compiler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from transformer import Transformer, TransformerConfig

pytestmark = pytest.mark.skipif(
    not has_gpu_compiler(), reason="needs XLA's GPU compiler, which needs no GPU: pip install 'jaxpar[aot]'"
)
CONFIG = TransformerConfig(
    vocab=4096, width=1024, depth=3, heads=8, kv_heads=8, hidden=4096, dtype=jnp.bfloat16
)


def loss_fn(model: Transformer, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def compiled_step(compile_for_gpu: Callable[..., Any], num_devices: int, **options: int):
    mesh = jaxpar.init_device_mesh((num_devices,), ("dp",), devices=topology("h100", num_devices=num_devices))
    model = nnx.eval_shape(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)))
    DistributedDataParallel(model, mesh, **options)
    optimizer = nnx.eval_shape(lambda model: nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param), model)
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh)
    tokens = jax.ShapeDtypeStruct((num_devices, 1025), jnp.int32)
    num_bytes = sum(4 * x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return compile_for_gpu(step.lower(tokens)), mesh, num_bytes


@pytest.mark.parametrize("num_devices", [64, 4096])
def test_every_bucket_is_one_asynchronous_all_reduce_under_a_matmul(
    num_devices: int, compile_for_gpu: Callable[..., Any]
) -> None:
    compiled, mesh, num_bytes = compiled_step(compile_for_gpu, num_devices)
    table, report = collectives(compiled, mesh=mesh), overlap(compiled, mesh=mesh)
    # head | 3 x (down, up + gate, out + qkv) | embedding | the norms | loss
    assert table.bytes("all_reduce", "dp") == table.bytes() == num_bytes + 4
    assert 8 <= table.count("all_reduce") <= 16
    assert report.async_fraction == 1.0
    assert report.overlapped_fraction >= 0.8


def test_one_bucket_cannot_overlap(compile_for_gpu: Callable[..., Any]) -> None:
    one = {"bucket_bytes": 1 << 60, "first_bucket_bytes": 1 << 60}
    compiled, mesh, _ = compiled_step(compile_for_gpu, 64, **one)
    assert collectives(compiled, mesh=mesh).count("all_reduce") == 2
    assert overlap(compiled, mesh=mesh).overlapped_fraction < 0.1
