"""Ring attention equals dense attention: value and all gradients, for every layout, mask and rotation."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.cp import head_tail_order, join_sequence, ring_attention, split_sequence
from jaxpar.mesh import init_device_mesh

BATCH, HEADS, KV_HEADS, FEATURES = 2, 4, 2, 8
QUICK = {"xla_backend_optimization_level": 0}  # LLVM's effort: the same HLO, half the compile time


@dataclass(frozen=True)
class Case:
    """One program; no ranks is outside shard_map; documents by their lengths, the rest of a sequence is padding."""

    ranks: int
    causal: bool = True
    rotate: Any = "ppermute"
    documents: tuple[int, ...] = ()
    block_size: int = 512
    load_balanced: bool = True
    length: int = 32
    tell_length: bool = False
    dtype: str = "float32"


CASES = {
    "one rank, blocks, documents and padding": Case(1, documents=(5, 11, 9), block_size=8),
    "head and tail, blocks, documents across ranks, uneven": Case(
        4, documents=(3, 10, 9), block_size=2, length=27
    ),
    "not causal, ring": Case(4, causal=False, block_size=4),
    "not causal, contiguous, documents, uneven": Case(
        2,
        causal=False,
        rotate="allgather",
        documents=(7, 20),
        load_balanced=False,
        length=27,
        tell_length=True,
    ),
    "causal, contiguous": Case(2, load_balanced=False, block_size=8),
}


def segments_of(case: Case) -> jax.Array | None:
    """Documents differ between the rows of the batch: the second has them in reverse order."""
    if not case.documents:
        return None
    padding = case.length - sum(case.documents)
    rows = [
        np.repeat([*range(len(case.documents)), -1], [*lengths, padding])
        for lengths in (case.documents, case.documents[::-1])
    ]
    return jnp.asarray(np.stack(rows), jnp.int32)


def inputs_of(case: Case) -> tuple[jax.Array, ...]:
    """q, k, v and the cotangent of the output."""
    random = np.random.default_rng(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    shapes = [(BATCH, h, case.length, FEATURES) for h in heads]
    return tuple(jnp.asarray(random.normal(size=shape), case.dtype) for shape in shapes)


def ring(case: Case) -> dict[str, np.ndarray]:
    """The output and all gradients, over (dp=2, cp=c), from whole sequences that each rank cuts itself."""

    def local(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, segments: jax.Array | None) -> Any:
        out, backward = jax.vjp(lambda *qkv: attend(case, *qkv, segments), q, k, v)
        return out, *backward(dout)

    if case.ranks:
        devices = jax.devices()[: 2 * case.ranks]
        mesh = init_device_mesh((2, case.ranks), ("dp", "cp"), devices=devices).jax_mesh
        local = jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    return named(jax.jit(local, compiler_options=QUICK)(*inputs_of(case), segments_of(case)))


def attend(case: Case, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    layout = {"load_balanced": case.load_balanced}
    if segments is not None:
        segments = split_sequence(segments, "cp", pad_value=-1, **layout)
    out = ring_attention(
        *(split_sequence(x, "cp", dim=2, **layout) for x in (q, k, v)),
        "cp",
        causal=case.causal,
        segment_ids=segments,
        length=case.length if case.tell_length else None,
        rotate=case.rotate,
        block_size=case.block_size,
        **layout,
    )
    assert out.dtype == case.dtype
    return join_sequence(out, "cp", dim=2, length=case.length, invariant=True, **layout)


def dense(case: Case) -> dict[str, np.ndarray]:
    """The same on one device, with all T x T scores and every key/value head repeated."""
    q, k, v, dout = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in inputs_of(case))
    return named(_dense_and_gradients(q, k, v, dout, visible_of(case)))


@functools.partial(jax.jit, compiler_options=QUICK)
def _dense_and_gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, visible: jax.Array
) -> tuple[jax.Array, ...]:
    out, backward = jax.vjp(lambda *qkv: _dense(*qkv, visible), q, k, v)
    return out, *backward(dout)


def _dense(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | np.ndarray) -> jax.Array:
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
    scores = jnp.einsum("bhqe,bhke->bhqk", q, k) / np.sqrt(FEATURES)
    p = jnp.where(visible, jnp.exp(scores), 0)
    total = p.sum(-1, keepdims=True)
    return jnp.einsum("bhqk,bhke->bhqe", p / jnp.where(total == 0, 1, total), v)


def visible_of(case: Case) -> np.ndarray:
    """bool[B, 1, T, T]."""
    visible = np.ones((BATCH, 1, case.length, case.length), bool)
    visible &= np.tri(case.length, dtype=bool) | (not case.causal)
    segments = segments_of(case)
    if segments is None:
        return visible
    rows, keys = np.asarray(segments)[:, None, :, None], np.asarray(segments)[:, None, None, :]
    return visible & (rows == keys) & (rows >= 0)


def named(arrays: tuple[jax.Array, ...]) -> dict[str, np.ndarray]:
    wide = (np.asarray(x.astype(jnp.promote_types(x.dtype, jnp.float32))) for x in arrays)
    return dict(zip(("out", "q", "k", "v"), wide, strict=True))


def worst(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Largest error, as a part of the largest number of its array."""
    return max(np.abs(found[name] - x).max() / np.abs(x).max() for name, x in expected.items())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_output_and_gradients_equal_dense_attention(case: Case) -> None:
    found, expected = ring(case), dense(case)
    assert worst(found, expected) < 1e-5
    padding = np.zeros((BATCH, 1, case.length, 1), bool)
    if case.documents:
        padding[:, 0, :, 0] = np.asarray(segments_of(case)) < 0
    for array in found.values():  # padding sees nothing and is not seen
        assert (array[np.broadcast_to(padding, array.shape)] == 0).all()


def test_float64_stays_float64() -> None:
    with jax.enable_x64(True):
        case = Case(4, rotate="allgather", documents=(3, 13, 16), block_size=2, dtype="float64")
        assert worst(ring(case), dense(case)) < 1e-12


def test_bfloat16_is_summed_in_float32_and_outside_shard_map_it_is_plain_attention() -> None:
    case = Case(0, dtype="bfloat16", length=256, block_size=4)
    found, exact = ring(case), dense(case)
    # The output is a float32 sum of probabilities rounded once, rounded once: 2 x 2^-9 = 0.004. Summed in bfloat16
    # over 64 blocks it is wrong by 0.009.
    assert worst(found, {"out": exact.pop("out")}) < 2 * 2**-9
    # In gradients ds = p (dp - delta) is rounded too, and delta comes from the rounded output.
    assert worst(found, exact) < 4 * 2**-9


def test_layers_in_a_scan_recomputed_in_the_backward_with_keys_that_all_rows_of_the_batch_share() -> None:
    """Keys are equal over dp, queries are not: a key's gradient is the sum over dp, of both layers."""
    case, order = Case(2), head_tail_order(32, 2)
    q, k, v, weights = inputs_of(case)
    mesh = init_device_mesh((2, 2), ("dp", "cp"), devices=jax.devices()[:4]).jax_mesh

    def stack(attend: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        layer = jax.checkpoint(
            lambda x: x + attend(x, *(jnp.broadcast_to(y, (len(x), *y.shape)) for y in (k, v)))
        )
        return jax.lax.scan(lambda x, _: (layer(x), None), q, length=2)[0]

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        rows, shared = P("dp", None, "cp"), P(None, "cp")
        ring = functools.partial(
            stack, lambda *qkv: ring_attention(*qkv, "cp", rotate="ppermute", block_size=4)
        )
        f = jax.shard_map(ring, mesh=mesh, in_specs=(rows, shared, shared), out_specs=rows)
        return (f(q[:, :, order], k[:, order], v[:, order]) * weights[:, :, order]).sum()

    def expected(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return (stack(lambda *qkv: _dense(*qkv, visible_of(case)), q, k, v) * weights).sum()

    found, exact = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)), compiler_options=QUICK)(q, k[0], v[0])
        for f in (loss, expected)
    )
    assert worst(named((found[0], *found[1])), named((exact[0], *exact[1]))) < 1e-5


def test_these_tests_can_fail() -> None:
    case = CASES["one rank, blocks, documents and padding"]
    assert worst(dense(case), dense(replace(case, documents=()))) > 1e-2
    assert worst(dense(case), dense(replace(case, causal=False))) > 1e-2
