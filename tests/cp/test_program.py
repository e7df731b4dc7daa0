"""What the compiled program does: hops and gathers, score blocks, bytes. Nothing here is run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.cp import ring_attention
from jaxpar.debug import assert_collectives, memory
from jaxpar.debug._flops import matmul_flops
from jaxpar.debug._hlo import parse_module
from jaxpar.mesh import init_device_mesh

HEADS, KV_HEADS, FEATURES, LENGTH, BLOCK = 2, 1, 16, 4096, 32
ROWS = P(None, None, "cp", None)


def mesh_of(ranks: int) -> Mesh:
    return init_device_mesh((ranks,), ("cp",), devices=jax.devices()[:ranks]).jax_mesh


def shapes_of(length: int, dtype: Any = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v and the cotangent of the output."""
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return tuple(jax.ShapeDtypeStruct((1, h, length, FEATURES), dtype) for h in heads)


@functools.cache
def compiled(ranks: int, rotate: Any, *, backward: bool = True) -> jax.stages.Compiled:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ring_attention(q, k, v, "cp", rotate=rotate, block_size=BLOCK)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, vjp = jax.vjp(attend, q, k, v)
        return out, vjp(dout)

    mesh, shapes = mesh_of(ranks), shapes_of(LENGTH)
    f = jax.shard_map(both if backward else attend, mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    options = {"xla_backend_optimization_level": 0}  # LLVM's effort: the same HLO and the same memory plan
    return jax.jit(f).lower(*(shapes if backward else shapes[:3])).compile(options)


@pytest.mark.parametrize(
    ("rotate", "forward", "whole"),
    [
        ("ppermute", {"collective_permute": 3}, {"collective_permute": 3 + 3 + 3}),
        ("allgather", {"all_gather": 1}, {"all_gather": 1 + 1, "collective_permute": 3}),
    ],
)
def test_collectives(rotate: str, forward: dict[str, int], whole: dict[str, int]) -> None:
    """Keys and values in one message: c-1 hops or one gather forward, the same backward, c-1 hops of gradients."""
    part = 2 * KV_HEADS * LENGTH // 4 * FEATURES * 4
    sizes = {"collective_permute": part, "all_gather": 4 * part}
    for backward, counts in ((False, forward), (True, whole)):
        expected = {(kind, "cp"): count for kind, count in counts.items()}
        num_bytes = {(kind, "cp"): count * sizes[kind] for kind, count in counts.items()}
        program = compiled(4, rotate, backward=backward)
        assert_collectives(program, expected=expected, bytes=num_bytes, mesh=mesh_of(4))


@pytest.mark.parametrize(
    ("ranks", "backward", "num_matmuls"), [(2, False, 2), (4, False, 2), (4, True, 2 + 5)]
)
def test_every_rank_computes_only_what_is_visible(ranks: int, backward: bool, num_matmuls: int) -> None:
    """One program without branches, so all ranks do the same; a quarter of a step is L/2 x L/2 scores.

    Step 0 has one whole quarter and two triangles, each later step two quarters: c L^2/2 and half of the diagonal
    blocks. A block has 2 matmuls forward, 5 backward.
    """
    module = parse_module(compiled(ranks, "ppermute", backward=backward).as_text())
    entry = module.computations[module.entry]
    flops = sum(matmul_flops(module, entry, instruction) for instruction in entry.instructions)
    blocks = LENGTH // ranks // BLOCK
    visited = ranks * blocks**2 // 2 + blocks // 2
    assert flops == visited * num_matmuls * 2 * HEADS * BLOCK**2 * FEATURES
    assert not any(i.opcode == "conditional" for c in module.computations.values() for i in c.instructions)


def test_temporaries_are_a_few_arrays_of_this_rank_s_rows_and_no_scores() -> None:
    """Here a rank's q, dq, dout, and its k, v and dk, dv in one array, all have the same size in float32."""
    two, four = (memory(compiled(ranks, "ppermute", backward=False)).temp_bytes for ranks in (2, 4))
    assert 0.45 < four / two < 0.55
    part = 2 * KV_HEADS * LENGTH // 4 * FEATURES * 4
    whole = memory(compiled(4, "ppermute")).temp_bytes
    # q, dout, dq; own k, v and their gradients; k, v of two other ranks, and two of their gradients. Then blocks.
    assert 7 * part < whole < (9 + 0.5) * part
    assert whole < HEADS * LENGTH * LENGTH * 4 / 64
    # All ranks' keys and values in place of two.
    gathered = memory(compiled(4, "allgather")).temp_bytes
    assert whole + part < gathered < whole + 4 * part


def test_the_backward_keeps_this_rank_s_rows_only() -> None:
    kept: list[tuple[tuple[int, ...], str]] = []

    def trace(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out, vjp = jax.vjp(lambda *qkv: ring_attention(*qkv, "cp"), q, k, v)
        kept.extend((x.shape, str(x.dtype)) for x in jax.tree.leaves(vjp))
        return out

    f = jax.shard_map(trace, mesh=mesh_of(4), in_specs=ROWS, out_specs=ROWS)
    jax.eval_shape(f, *shapes_of(LENGTH, jnp.bfloat16)[:3])
    rows = [((1, heads, LENGTH // 4, FEATURES), "bfloat16") for heads in (HEADS, HEADS, KV_HEADS, KV_HEADS)]
    log_sum_exp = ((1, KV_HEADS, HEADS // KV_HEADS, LENGTH // 4), "float32")
    assert sorted(kept) == sorted([*rows, log_sum_exp])  # q, the output, k, v
