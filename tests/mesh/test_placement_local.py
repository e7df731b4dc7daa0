"""Whole values onto the mesh, and the pieces that devices hold (rows D3, D10-D12, D15)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar._errors import PlacementError
from jaxpar.debug import count_compilations
from jaxpar.mesh import (
    Partial,
    PlacedArray,
    Replicate,
    Shard,
    distribute,
    from_local,
    full_array,
    init_device_mesh,
    placements_of,
    redistribute,
    to_local,
)

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
DENSE = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)


def mesh22():
    return init_device_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])


@pytest.mark.parametrize("placements", [(R, R), (S0, R), (S0, S1), (S0, S0), (Shard(0, after=("tp",)), S0)])
def test_distribute_keeps_every_bit(placements):
    x = distribute(DENSE, mesh22(), placements)
    assert placements_of(x) == placements
    np.testing.assert_array_equal(x, DENSE)


@pytest.mark.parametrize(
    "placements", [(R, R), (S0, R), (S0, S1), (S0, S0), (Shard(0, after=("tp",)), S0), (P, S1)]
)
def test_from_local_undoes_to_local(placements):
    mesh = mesh22()
    x = redistribute(
        distribute(DENSE, mesh, [R if place == P else place for place in placements]), placements
    )
    y = from_local(to_local(x), mesh, placements)
    assert y.sharding == x.sharding
    np.testing.assert_array_equal(full_array(y), DENSE)


def test_from_local_of_uneven_pieces_needs_the_shape():
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    pieces = [np.arange(2), np.arange(2, 4), np.arange(4, 5), np.arange(0)]
    x = from_local(pieces, mesh, [S0], shape=(5,))
    np.testing.assert_array_equal(full_array(x), np.arange(5))
    assert [len(piece) for piece in to_local(x)] == [2, 2, 1, 0]
    with pytest.raises(
        PlacementError, match=r"the piece at {'dp': 2} has shape \(1,\).*holds \(2,\).*need shape="
    ):
        from_local(pieces, mesh, [S0])


def test_to_local_moves_and_compiles_nothing():
    x = distribute(DENSE, mesh22(), (S0, S1))
    with count_compilations() as compiled:
        pieces = to_local(x)
    assert compiled.count == 0
    assert [piece.shape for piece in pieces] == [(4, 2)] * 4
    assert [piece.devices() for piece in pieces] == [{device} for device in jax.devices()[:4]]


TERMS = np.asarray([3.0, -1.0, 4.0, 2.0], dtype=np.float32)
OPS = {"sum": np.sum, "avg": np.mean, "min": np.min, "max": np.max, "product": np.prod}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("target", [R, S0])
def test_terms_reduce_to_their_value(op, target):
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    value = np.arange(1, 9, dtype=np.float32)
    x = from_local(lambda place: value * TERMS[place[0]], mesh, [Partial(op)])
    assert placements_of(x) == (Partial(op),)
    assert isinstance(x, PlacedArray) == (op != "sum")
    expected = OPS[op](value[:, None] * TERMS, axis=1)
    np.testing.assert_array_equal(redistribute(x, [target]), expected)


@pytest.mark.parametrize("op", OPS)
def test_scalars_reduce_too(op):
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    x = from_local(list(TERMS), mesh, [Partial(op)])
    assert x.shape == () and [float(piece) for piece in to_local(x)] == TERMS.tolist()
    assert full_array(x) == OPS[op](TERMS)


@pytest.mark.parametrize("op", OPS)
def test_a_value_becomes_terms_of_itself(op):
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    x = redistribute(distribute(TERMS, mesh, [S0]), [Partial(op)])
    assert placements_of(x) == (Partial(op),)
    np.testing.assert_array_equal(full_array(x), TERMS)


def test_one_kind_of_terms_becomes_another():
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    x = from_local(list(TERMS), mesh, [Partial("max")])
    assert full_array(redistribute(x, [Partial("avg")])) == 4.0


def test_check_compares_copies():
    mesh = mesh22()
    assert placements_of(from_local([DENSE] * 4, mesh, (R, R), check=True)) == (R, R)
    with pytest.raises(
        PlacementError, match=r"the pieces at {'dp': 0, 'tp': 0} and {'dp': 0, 'tp': 1} differ"
    ):
        from_local(lambda place: DENSE + place[1], mesh, (S0, R), check=True)


def test_distribute_inside_jit_and_on_a_slice():
    mesh = mesh22()
    y = jax.jit(lambda x: distribute(x, mesh["tp"], [S1]))(jnp.asarray(DENSE))
    assert placements_of(y) == (R, S1)


def test_distribute_takes_what_lies_there_already():
    mesh = mesh22()
    x = distribute(DENSE, mesh, (S0, S1))
    assert distribute(x, mesh, (S0, S1)) is x
    replicated = distribute(DENSE, mesh, (R, R))
    assert placements_of(distribute(replicated, mesh, (S0, R))) == (S0, R)


def test_mistakes():
    mesh = mesh22()
    x = distribute(DENSE, mesh, (S0, S1))
    with pytest.raises(PlacementError, match=r"lies on a mesh already.*Write redistribute\(x, placements\)"):
        distribute(x, mesh, (S1, R))
    with pytest.raises(PlacementError, match=r"is placed already"):
        distribute(distribute(DENSE[:7], mesh, (S0, R), pad=True), mesh, (R, R))
    with pytest.raises(PlacementError, match=r"distribute: Partial on \('dp',\). A whole value has no terms"):
        distribute(DENSE, mesh, (P, R))
    with pytest.raises(PlacementError, match=r"1 placements"):
        distribute(DENSE, mesh, [S0])
    with pytest.raises(PlacementError, match=r"3 pieces for the 4 devices"):
        from_local([DENSE] * 3, mesh, (R, R))
    with pytest.raises(PlacementError, match=r"is int32, the first one float32"):
        from_local([DENSE] * 3 + [DENSE.astype(np.int32)], mesh, (R, R))
    with pytest.raises(PlacementError, match=r"shape \(8,\) has another rank than the pieces"):
        from_local([DENSE] * 4, mesh, (R, R), shape=(8,))
    with pytest.raises(PlacementError, match=r"a mean of integers is not an integer"):
        from_local([np.arange(3)] * 4, mesh, (Partial("avg"), R))
    with pytest.raises(PlacementError, match=r"to_local: inside jit there are no single devices"):
        jax.jit(to_local)(x)
    with pytest.raises(PlacementError, match=r"does not lie on a mesh"):
        to_local(jnp.ones(3))


def test_a_process_without_devices_in_the_mesh_has_nothing_to_give(monkeypatch):
    mesh = mesh22()
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(PlacementError, match=r"this process has no device in the mesh"):
        from_local([], mesh, (R, R))
