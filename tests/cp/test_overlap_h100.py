"""Compiled for H100s that are not here: every hop of the ring travels under a block of attention."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar._compat import compiler_options
from jaxpar.cp import ring_attention
from jaxpar.debug import collectives, memory, overlap, topology
from jaxpar.debug._topology import has_gpu_compiler
from jaxpar.mesh import init_device_mesh

pytestmark = pytest.mark.skipif(
    not has_gpu_compiler(), reason="needs XLA's GPU compiler, which needs no GPU: pip install 'jaxpar[aot]'"
)

RANKS, HEADS, KV_HEADS, LENGTH, FEATURES = 4, 8, 2, 16384, 128
ROWS = P(None, None, "cp", None)


@pytest.fixture(autouse=True, scope="module")
def compile_quickly() -> None:
    """The GPU's program is compiled with all optimizations: what overlaps with what is their result."""


def test_every_byte_travels_under_a_matmul() -> None:
    mesh = init_device_mesh((RANKS,), ("cp",), devices=topology("h100", num_devices=RANKS)).jax_mesh

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, vjp = jax.vjp(lambda *qkv: ring_attention(*qkv, "cp", rotate="ppermute"), q, k, v)
        return out, vjp(dout)

    shapes = [
        jax.ShapeDtypeStruct((1, heads, LENGTH, FEATURES), jnp.bfloat16, sharding=NamedSharding(mesh, ROWS))
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    f = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=ROWS, out_specs=ROWS))
    program = f.lower(*shapes).compile(dict(compiler_options("gpu")))
    report = overlap(program, mesh=mesh)
    assert (report.async_fraction, report.overlapped_fraction) == (1, 1)
    # bfloat16 keys and values, float32 gradients.
    part = 2 * KV_HEADS * LENGTH // RANKS * FEATURES * 2
    assert collectives(program, mesh=mesh).bytes("collective_permute", "cp") == 3 * (1 + 1 + 2) * part
    scores = HEADS * LENGTH * LENGTH * 4
    assert memory(program).temp_bytes < scores / 64
