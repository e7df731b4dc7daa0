"""Placements as objects, and their conversion to PartitionSpec and NamedSharding and back (rows D1-D4)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpar._errors import PlacementError
from jaxpar.mesh import (
    Partial,
    Replicate,
    Shard,
    distribute,
    init_device_mesh,
    placements_of,
    placements_to_sharding,
    placements_to_spec,
    spec_to_placements,
)

R, P = Replicate(), Partial()


@pytest.mark.parametrize(
    ("placement", "repr_", "str_"),
    [
        (Shard(0), "Shard(dim=0)", "S(0)"),
        (Shard(-1), "Shard(dim=-1)", "S(-1)"),
        (Shard(0, after=("tp",)), "Shard(dim=0, after=('tp',))", "S(0, after tp)"),
        (Replicate(), "Replicate()", "R"),
        (Partial(), "Partial(sum)", "P(sum)"),
        (Partial("avg"), "Partial(avg)", "P(avg)"),
    ],
)
def test_placements_print_as_pytorch_prints_them(placement, repr_, str_):
    assert (repr(placement), str(placement)) == (repr_, str_)


def test_placements_are_values():
    assert Shard(1) == Shard(1) and Shard(1) != Shard(-1) and Partial() == Partial("sum")
    assert len({Shard(0), Shard(0), Replicate(), Replicate(), Partial()}) == 3
    with pytest.raises(AttributeError):
        Shard(0).dim = 1  # pyright: ignore


@pytest.mark.parametrize(
    ("placements", "spec"),
    [
        ((R, R), PartitionSpec()),
        ((Shard(0), R), PartitionSpec("dp")),
        ((R, Shard(1)), PartitionSpec(None, "tp")),
        ((Shard(-1), Shard(-2)), PartitionSpec("tp", "dp")),
        ((Shard(0), Shard(0)), PartitionSpec(("dp", "tp"))),
        ((Shard(0, after=("tp",)), Shard(0)), PartitionSpec(("tp", "dp"))),
        ((Shard(1), P), PartitionSpec(None, "dp", unreduced={"tp"})),
        ((P, P), PartitionSpec(unreduced={"dp", "tp"})),
    ],
)
def test_placements_and_specs_convert_both_ways(placements, spec):
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    assert placements_to_spec(placements, mesh, 2) == spec
    plain = tuple(
        Shard(place.dim % 2, place.after) if isinstance(place, Shard) else place for place in placements
    )
    assert spec_to_placements(spec, mesh, ndim=2) == plain
    sharding = placements_to_sharding(placements, mesh, 2)
    assert sharding.spec == spec
    assert spec_to_placements(sharding, ndim=2) == plain


def test_every_nesting_order_survives_the_way_there_and_back():
    names = ("a", "b", "c", "d")
    mesh = init_device_mesh((2, 2, 2, 1), names)
    for order in itertools.permutations(names):
        placements = spec_to_placements(PartitionSpec(order), mesh)
        assert placements_to_spec(placements, mesh, 1) == PartitionSpec(order)


def test_partial_needs_explicit_axes_and_others_stay_auto():
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    assert set(placements_to_sharding((P, R), mesh, 1).mesh.axis_types) == {AxisType.Explicit}
    assert placements_to_sharding((R, R), mesh, 1).mesh == mesh.jax_mesh


def test_a_slice_names_its_own_axes_only():
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    assert placements_to_spec((Shard(0),), mesh["tp"], 2) == PartitionSpec("tp")
    assert spec_to_placements(PartitionSpec("tp"), mesh["dp"]) == (R,)


def test_placements_of_reads_arrays_and_abstract_arrays():
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    sharding = NamedSharding(mesh.jax_mesh, PartitionSpec(None, ("tp", "dp")))
    expected = (Shard(1, after=("tp",)), Shard(1))
    assert placements_of(jax.device_put(jnp.ones((2, 8)), sharding)) == expected
    assert placements_of(jax.ShapeDtypeStruct((2, 8), jnp.float32, sharding=sharding)) == expected
    assert placements_of(jax.device_put(jnp.ones((2, 8)), sharding), mesh["tp"]) == (Shard(1),)


def test_one_placement_object_serves_arrays_of_any_rank():
    mesh = init_device_mesh((2,), ("dp",), devices=jax.devices()[:2])
    last = Shard(-1)
    for ndim in (1, 2, 3):
        assert placements_of(distribute(np.ones((4,) * ndim), mesh, [last])) == (Shard(ndim - 1),)
    assert last == Shard(-1)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ((Shard(0),), r"1 placements .* for the 2 axes \('dp', 'tp'\)"),
        ((Shard(2), R), r"Shard\(dim=2\) for axis 'dp': dim 2 does not exist in an array of rank 2.*-2 to 1"),
        ((R, Shard(-3)), r"Shard\(dim=-3\) for axis 'tp': dim -3 does not exist"),
        ((R, "tp"), r"'tp' for axis 'tp' is not a placement"),
        ((P, Partial("max")), r"mix the reduce ops \['max', 'sum'\]"),
        ((R, Partial("max")), r"Partial over tp: max has no PartitionSpec"),
        ((Shard(0, after=("tp",)), Shard(1)), r"axis 'tp' does not split dim 0 before 'dp' does"),
        ((Shard(0, after=("tp",)), Shard(0, after=("dp",))), r"each said to split a dim after the other"),
    ],
)
def test_bad_placements(placements, message):
    with pytest.raises(PlacementError, match=message):
        placements_to_spec(placements, init_device_mesh((2, 4), ("dp", "tp")), 2)


def test_other_mistakes():
    mesh = init_device_mesh((8,), ("dp",))
    with pytest.raises(PlacementError, match=r"Partial\('xor'\): the op must be one of sum, avg"):
        Partial("xor")
    with pytest.raises(PlacementError, match=r"a scalar|A scalar has no dim to split"):
        placements_to_spec((Shard(0),), mesh, 0)
    with pytest.raises(PlacementError, match=r"does not say its mesh"):
        spec_to_placements(PartitionSpec("dp"))
    with pytest.raises(PlacementError, match=r"leaves a dim unconstrained"):
        spec_to_placements(PartitionSpec(PartitionSpec.UNCONSTRAINED), mesh)
    with pytest.raises(PlacementError, match=r"placements_of: an array with sharding"):
        placements_of(jnp.ones(3))
    with pytest.raises(PlacementError, match=r"placements_of: a traced array does not say"):
        jax.jit(placements_of)(distribute(np.ones(8), mesh, [Shard(0)]))
