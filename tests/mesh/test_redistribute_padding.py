"""Dims that do not divide: an error without `pad`, and padding that nobody sees with it (row D2)."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar._errors import PlacementError
from jaxpar.debug import collectives
from jaxpar.mesh import (
    Partial,
    PlacedArray,
    Replicate,
    Shard,
    distribute,
    full_array,
    init_device_mesh,
    placements_of,
    redistribute,
    redistribution_plan,
    to_local,
    zeros,
)
from jaxpar.mesh._chunks import deal_table, join_table, padded_length, piece_lengths, row_table
from jaxpar.mesh._layout import make_layout
from jaxpar.mesh._move import compiled_plan
from jaxpar.mesh._placed import hold

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
INNER = Shard(0, after=("tp",))
SIZES = [0, 1, 3, 4, 5, 9]  # 0, 1, W-1, W, W+1, kW+1 for W = 4


def mesh_of(*shape: int):
    return init_device_mesh(shape, ("dp", "tp")[: len(shape)], devices=jax.devices()[: int(np.prod(shape))])


def torch_chunk(rows: np.ndarray, parts: tuple[int, ...]) -> list[np.ndarray]:
    """What `torch.chunk` over one axis after the other leaves on each rank."""
    if not parts:
        return [rows]
    step = -(-len(rows) // parts[0])
    pieces = [rows[rank * step : (rank + 1) * step] for rank in range(parts[0])]
    return [piece for part in pieces for piece in torch_chunk(part, parts[1:])]


@pytest.mark.parametrize("size", [*SIZES, 7, 8, 16])
@pytest.mark.parametrize("parts", [(), (1,), (2,), (4,), (2, 2), (2, 4), (4, 2), (2, 2, 2)])
def test_pieces_are_torch_chunks(size, parts):
    pieces = torch_chunk(np.arange(size), parts)
    assert piece_lengths(size, parts) == tuple(len(piece) for piece in pieces)
    table = row_table(size, parts)
    assert table.shape == (len(pieces), padded_length(size, parts))
    for row, piece in zip(table, pieces, strict=True):
        assert row[row >= 0].tolist() == piece.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_joining_undoes_dealing(size):
    outer, inner = (2,), (2, 2)
    for place, held in enumerate(row_table(size, outer)):
        padded = np.append(held, -1)
        dealt = np.append(padded[deal_table(size, outer, inner)[place]], -1)
        assert dealt[join_table(size, outer, inner)[place]].tolist() == held.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_locals_side_by_side_are_the_whole(size):
    value = np.arange(size * 3, dtype=np.float32).reshape(size, 3)
    x = distribute(value, mesh_of(4), [S0], pad=True)
    assert isinstance(x, PlacedArray) == bool(size % 4)
    assert x.shape == value.shape
    np.testing.assert_array_equal(np.concatenate([np.asarray(piece) for piece in to_local(x)]), value)
    np.testing.assert_array_equal(full_array(x), value)


DENSE = np.arange(5 * 7, dtype=np.float32).reshape(5, 7)
CASES = [
    ((4,), (R,), (S0,)),
    ((4,), (S0,), (S1,)),
    ((4,), (P,), (S0,)),
    ((4,), (S1,), (P,)),
    ((2, 2), (S0, S0), (R, S0)),
    ((2, 2), (S0, S0), (S1, S0)),
    ((2, 2), (INNER, S0), (S0, S0)),
    ((2, 2), (P, S0), (S0, S0)),
]


@pytest.mark.parametrize(("shape", "source", "target"), CASES)
def test_padded_transitions(shape, source, target):
    mesh = mesh_of(*shape)
    x = distribute(DENSE, mesh, [R if place == P else place for place in source], pad=True)
    x = redistribute(x, source, pad=True)
    plan = redistribution_plan(x, target)
    y = redistribute(x, target, pad=True)
    assert placements_of(y) == target
    held = hold(x)
    program = compiled_plan(held.mesh, held.extent, held.layout, make_layout(target, held.mesh, 2))
    table = collectives(program, held.array, mesh=held.mesh)
    assert Counter(row.kind for row in table) == Counter(plan.collectives)
    assert table.wire_bytes() == plan.sent_bytes
    if P not in target:
        expected = to_local(distribute(DENSE, mesh, target, pad=True))
        for piece, wanted in zip(to_local(y), expected, strict=True):
            np.testing.assert_array_equal(piece, wanted)
    np.testing.assert_array_equal(full_array(y), DENSE)


def test_padding_is_zero_in_memory_and_unseen_in_reductions():
    x = distribute(DENSE, mesh_of(4), [S0], pad=True)
    assert x.array.shape == (8, 7)
    assert x.array[5:].sum() == 0
    shifted = jax.tree.map(lambda leaf: leaf + 100, x)  # padding is now 100; still unseen
    assert shifted.sum() == (DENSE + 100).sum()
    assert shifted.mean() == pytest.approx((DENSE + 100).mean())
    np.testing.assert_array_equal(full_array(shifted), DENSE + 100)
    np.testing.assert_array_equal(full_array(redistribute(shifted, [S1])), DENSE + 100)


def test_padded_arrays_say_what_they_are():
    x = distribute(DENSE, mesh_of(4), [S0], pad=True)
    assert (x.shape, x.ndim, x.size, x.dtype) == ((5, 7), 2, 35, np.float32)
    assert repr(x) == (
        "PlacedArray(float32[5, 7] as (S(0)) on DeviceMesh((dp=4), 'cpu', devices=4), in memory [8, 7])"
    )


def test_a_dim_that_divides_needs_no_wrapper():
    assert isinstance(distribute(np.ones((8, 7)), mesh_of(4), [S0], pad=True), jax.Array)
    assert isinstance(redistribute(distribute(DENSE, mesh_of(4), [S0], pad=True), [R]), jax.Array)


def test_without_pad_an_uneven_dim_is_an_error():
    mesh = mesh_of(2, 2)
    message = r"dim 0 of shape \(5, 7\) has size 5, which does not divide over dp=2 \* tp=2 \(5 = 1 \* 4 \+ 1\).*pad=True"
    with pytest.raises(PlacementError, match="distribute: " + message):
        distribute(DENSE, mesh, (S0, S0))
    with pytest.raises(PlacementError, match="redistribute: " + message):
        redistribute(distribute(DENSE, mesh, (R, R)), (S0, S0))
    with pytest.raises(PlacementError, match="full: " + message):
        zeros((5, 7), mesh, (S0, S0))
    with pytest.raises(PlacementError, match="redistribute: source: " + message):
        jax.jit(lambda x: redistribute(x, (R, R), mesh, source=(S0, S0)))(jnp.asarray(DENSE))


def test_sums_over_elements_need_reduced_terms():
    x = redistribute(distribute(DENSE, mesh_of(2, 2), (S0, R), pad=True), (S0, P))
    with pytest.raises(PlacementError, match=r"terms over \('tp',\) are not reduced yet"):
        x.sum()
