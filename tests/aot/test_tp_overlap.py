"""Sequence-parallel transformer blocks over 8 H100s that are not here: rings of hops under matmuls, against plain sums.

    psum     |# matmul #|== sum ==|# matmul #|== sum ==|          nothing is left to compute while a sum travels
    ring     |# 0 #|# 1 #|# 2 #|...|# 7 #|                        each block's hop under the matmul of the block before
             |- 1 -|- 2 -|- 3 -|...|

Measured on jax 0.10.2, without any compiler option: all bytes of the rings travel under matmuls. Of the sums a quarter
does: one of four, the backward of a column layer, has the gradients of weights beside it; with `jax.checkpoint` around
the blocks, a fifth. Plain gathers and reduce-scatters of sequence parallel: a quarter too, and XLA's own windowed einsum
(`xla_gpu_threshold_for_windowed_einsum_mib=0`) does not change that, as it acts in XLA's partitioner, not in shard_map.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.debug import assert_collectives, memory, overlap, topology
from jaxpar.debug._topology import has_gpu_compiler
from jaxpar.mesh import init_device_mesh
from jaxpar.tp import all_gather_matmul, cross_entropy, matmul_reduce_scatter

pytestmark = pytest.mark.skipif(
    not has_gpu_compiler(), reason="needs XLA's GPU compiler, which needs no GPU: pip install 'jaxpar[aot]'"
)
TP, LAYERS, WIDTH, HIDDEN, HEAD, SEQUENCES, LENGTH = 8, 1, 4096, 16384, 128, 8, 512
ACTIVATION_BYTES = 2 * SEQUENCES * LENGTH * WIDTH  # bfloat16
Style = Literal["ring", "psum"]
Layer = dict[str, jax.Array]
SHAPES = {
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}
SPECS = {name: P("tp") if name in ("out", "down") else P(None, "tp") for name in SHAPES}


def columns(style: Style, x: jax.Array, w: jax.Array) -> jax.Array:
    if style == "ring":
        return all_gather_matmul(x, w, "tp", dim=1)
    return lax.pcast(x, "tp", to="varying") @ w  # its dual is the one sum of the backward


def rows(style: Style, h: jax.Array, w: jax.Array) -> jax.Array:
    return matmul_reduce_scatter(h, w, "tp", dim=1) if style == "ring" else lax.psum(h @ w, "tp")


def norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / HEAD**0.5
    return jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores), v)


def block(style: Style, x: jax.Array, layer: Layer) -> jax.Array:
    qkv = columns(style, norm(x), layer["qkv"])
    q, k, v = jnp.split(qkv.reshape(*qkv.shape[:2], -1, HEAD), 3, axis=2)
    mixed = attention(q, k, v)
    x += rows(style, mixed.reshape(*mixed.shape[:2], -1), layer["out"])
    return x + rows(style, jax.nn.gelu(columns(style, norm(x), layer["up"])), layer["down"])


def gradients(style: Style, layers: list[Layer], x: jax.Array) -> tuple[list[Layer], jax.Array]:
    def loss(layers: list[Layer], x: jax.Array) -> jax.Array:
        for layer in layers:
            x = block(style, x, layer)
        return (x.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))(layers, x)


def mesh_of_eight() -> Mesh:
    return init_device_mesh((TP,), ("tp",), devices=topology("h100", num_devices=TP)).jax_mesh


def lowered_gradients(style: Style) -> jax.stages.Lowered:
    mesh = mesh_of_eight()
    specs = ([SPECS] * LAYERS, P(None, "tp") if style == "ring" else P())
    body = functools.partial(gradients, style)
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs))
    abstract = jax.tree.map(
        lambda spec, shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)),
        specs,
        ([SHAPES] * LAYERS, (SEQUENCES, LENGTH, WIDTH)),
        is_leaf=lambda node: isinstance(node, P),
    )
    return f.lower(*abstract)


def test_every_hop_of_a_ring_travels_under_a_matmul(compile_for_gpu: Callable[..., Any]) -> None:
    compiled = compile_for_gpu(lowered_gradients("ring"))
    num_rings = LAYERS * 2 * 4  # forward and backward; attention in and out, MLP in and out
    hop_bytes = ACTIVATION_BYTES // TP
    assert_collectives(
        compiled,
        expected={("collective_permute", "tp"): num_rings * (TP - 1)},
        bytes={"collective_permute": num_rings * (TP - 1) * hop_bytes},
    )
    report = overlap(compiled)
    assert report.async_fraction == 1.0
    assert report.overlapped_fraction >= 0.95
    # Half a step's worth of its own matmul at least: what is beside a hop is not some small product.
    smallest_step = 2 * SEQUENCES * LENGTH * WIDTH * (WIDTH // TP) // TP
    assert all(row.matmul_flops >= smallest_step / 2 for row in report.rows)


def test_plain_sums_travel_alone(compile_for_gpu: Callable[..., Any]) -> None:
    compiled = compile_for_gpu(lowered_gradients("psum"))
    sums = LAYERS * 2 * 2
    assert_collectives(
        compiled,
        expected={("all_reduce", "tp"): sums},
        bytes={"all_reduce": sums * ACTIVATION_BYTES},
    )
    assert overlap(compiled).overlapped_fraction <= 0.3


def test_cross_entropy_keeps_one_copy_of_the_logits() -> None:
    """In bfloat16 as they came: neither float32 copies, nor probabilities, nor one-hot targets."""
    mesh, num_tokens, vocab = mesh_of_eight(), 8192, 131072

    def head(h: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
        logits = lax.pcast(h, "tp", to="varying") @ w
        return cross_entropy(logits, targets, "tp", label_smoothing=0.1, z_loss=1e-4, vocab_size=vocab - 100)

    specs = (P(), P(None, "tp"), P())
    gradients = jax.shard_map(jax.grad(head, argnums=(0, 1)), mesh=mesh, in_specs=specs, out_specs=specs[:2])
    shapes = (((num_tokens, WIDTH), jnp.bfloat16), ((WIDTH, vocab), jnp.bfloat16), ((num_tokens,), jnp.int32))
    abstract = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(shapes, specs, strict=True)
    ]
    logits_bytes = 2 * num_tokens * vocab // TP
    assert memory(jax.jit(gradients).lower(*abstract).compile()).temp_bytes <= 1.01 * logits_bytes
