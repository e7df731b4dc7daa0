"""Mistakes are named where they are made, with the numbers and the line to write instead."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar._errors import ParallelizeError
from jaxpar.cp import head_tail_order, join_sequence, ring_attention, sequence_positions, split_sequence
from jaxpar.mesh import init_device_mesh


def inside(f: Callable[[], Any]) -> None:
    """Traces per-device code on an axis cp of 4 ranks."""
    mesh = init_device_mesh((2, 4), ("dp", "cp")).jax_mesh

    def local() -> jax.Array:
        f()
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P()))


def attend(
    q: tuple[int, ...] = (2, 4, 8, 16),
    k: tuple[int, ...] = (2, 2, 8, 16),
    v: tuple[int, ...] | None = None,
    *,
    axis: str = "cp",
    dtypes: tuple[Any, ...] = (jnp.float32,) * 3,
    **options: Any,
) -> Callable[[], Any]:
    shapes = zip((q, k, v or k), dtypes, strict=True)
    return lambda: ring_attention(*(jnp.zeros(*shape) for shape in shapes), axis, **options)


BF16 = (jnp.bfloat16, jnp.float32, jnp.float32)
MISTAKES = {
    "axis": (
        attend(axis="pc"),
        "axis 'pc' is not in the mesh of this shard_map, whose axes are ('dp', 'cp')",
    ),
    "rotate": (
        attend(rotate="alltoall"),
        "rotate='alltoall' is unknown. Keys and values get round by 'allgather'",
    ),
    "near rotate": (attend(rotate="permute"), "Did you mean 'ppermute'?"),
    "block size": (attend(block_size=0), "block_size=0 rows"),
    "dims": (attend((8, 16), (8, 16)), "q float32[8, 16], k float32[8, 16], v float32[8, 16] do not fit"),
    "values": (attend(v=(2, 2, 8, 4)), "v float32[2, 2, 8, 4] do not fit"),
    "batch": (attend(k=(3, 2, 8, 16)), "differ in batch dims (2,) and (3,)"),
    "rows": (attend(k=(2, 2, 16, 16)), "rows 8 and 16"),
    "features": (attend(k=(2, 2, 8, 32)), "features 16 and 32"),
    "heads": (attend(k=(2, 3, 8, 16)), "4 query heads do not divide among 3 key/value heads"),
    "dtypes": (attend(dtypes=BF16), "q bfloat16[2, 4, 8, 16], k float32[2, 2, 8, 16]"),
    "integers": (attend(dtypes=(jnp.int32,) * 3), "must share one floating dtype"),
    "odd rows": (
        attend((2, 4, 7, 16), (2, 2, 7, 16)),
        "each of 4 ranks of axis 'cp' holds 7 rows of the sequence, an odd number. In the head-tail layout a rank "
        "holds two chunks of equal length, so the sequence divides by 2 x 4: 28 does not. Use split_sequence, which "
        "pads to 32",
    ),
    "segment shape": (
        lambda: attend(segment_ids=jnp.zeros((2, 32), jnp.int32))(),
        "segment_ids are int32[2, 32], but q [2, 4, 8, 16] needs an integer for each row, int32[2, 8]",
    ),
    "segment dtype": (lambda: attend(segment_ids=jnp.zeros((2, 8)))(), "segment_ids are float32[2, 8]"),
    "length": (
        attend(length=33),
        "length=33 rows, padded to 40, are not the 4 x 8 = 32 rows that the 4 ranks of axis 'cp' hold",
    ),
    "no length": (attend(length=0), "length=0 rows"),
    "split axis": (
        lambda: split_sequence(jnp.zeros((2, 8)), "c"),
        "split_sequence: axis 'c' is not in the mesh",
    ),
    "split dim": (
        lambda: split_sequence(jnp.zeros(8), "cp"),
        "split_sequence: dim=1 is not a dim of an array of shape (8,)",
    ),
    "join odd": (
        lambda: join_sequence(jnp.zeros((2, 3)), "cp"),
        "join_sequence: each of 4 ranks of axis 'cp' holds 3",
    ),
    "join length": (
        lambda: join_sequence(jnp.zeros((2, 4)), "cp", length=17),
        "join_sequence: length=17, but the 4 ranks of axis 'cp' hold 16 rows of dim 1 in all",
    ),
    "positions axis": (
        lambda: sequence_positions(8, "seq"),
        "sequence_positions: axis 'seq' is not in the mesh",
    ),
    "order": (
        lambda: head_tail_order(20, 4),
        "20 rows do not divide into 2 x 4 = 8 chunks, a head and a tail for each of 4 ranks. Pad the sequence at its "
        "end to padded_length(20, 4) = 24 rows",
    ),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ParallelizeError, match=re.escape(message)):
        inside(call)


def test_the_right_calls_pass() -> None:
    inside(attend(length=31, segment_ids=jnp.zeros((2, 8), jnp.int32)))
