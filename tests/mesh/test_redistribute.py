"""The transition table (parity 3.3): values, collectives and bytes of every transition, on one and two mesh axes."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxpar._errors import PlacementError
from jaxpar.debug import collectives, count_compilations
from jaxpar.mesh import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    distribute,
    full_array,
    init_device_mesh,
    placements_of,
    redistribute,
    redistribution_plan,
    to_local,
)
from jaxpar.mesh._layout import make_layout
from jaxpar.mesh._move import compiled_plan
from jaxpar.mesh._placed import Held, hold, release

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
INNER = Shard(0, after=("tp",))  # dp splits what tp has split
DENSE = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh(shape, ("dp", "tp")[: len(shape)], devices=jax.devices()[: int(np.prod(shape))])


def placed(mesh: DeviceMesh, placements: tuple, value: np.ndarray = DENSE) -> jax.Array:
    """`value` in these placements, partial terms included."""
    whole = distribute(value, mesh, [R if place == P else place for place in placements])
    return redistribute(whole, placements)


def run_and_count(x: jax.Array, placements: tuple) -> tuple[jax.Array, Counter]:
    """Compile the very program that `redistribute` runs, once; return its result and its collectives."""
    held = hold(x)
    target = make_layout(placements, held.mesh, x.ndim)
    program = compiled_plan(held.mesh, held.extent, held.layout, target).lower(held.array).compile()
    kinds = Counter(row.kind for row in collectives(program, mesh=held.mesh))
    return release(Held(program(held.array), held.shape, target, held.mesh), held.mesh), kinds


def assert_same_pieces(x: jax.Array, y: jax.Array) -> None:
    for one, other in zip(to_local(x), to_local(y), strict=True):
        np.testing.assert_array_equal(one, other)


def check_transition(mesh: DeviceMesh, source: tuple, target: tuple) -> None:
    x = placed(mesh, source)
    y, kinds = run_and_count(x, target)
    assert placements_of(y) == target
    assert kinds == Counter(redistribution_plan(x, target).collectives)
    if P in target:
        np.testing.assert_array_equal(full_array(y), DENSE)
    else:
        assert_same_pieces(y, distribute(DENSE, mesh, target))


ONE_AXIS = {
    (S0, R): ("all_gather",),
    (S1, R): ("all_gather",),
    (S0, S1): ("all_to_all",),
    (S1, S0): ("all_to_all",),
    (R, S0): (),
    (R, S1): (),
    (P, R): ("all_reduce",),
    (P, S0): ("reduce_scatter",),
    (P, S1): ("reduce_scatter",),
    (R, P): (),
    (S0, P): (),
    (S1, P): (),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("source", "target"), ONE_AXIS)
def test_every_transition_on_one_axis(size, source, target):
    mesh = mesh_of(size)
    check_transition(mesh, (source,), (target,))
    assert redistribution_plan(placed(mesh, (source,)), (target,)).collectives == ONE_AXIS[source, target]


@pytest.mark.parametrize("source", [R, S0, S1, P])
def test_an_axis_of_size_one_never_communicates(source):
    mesh = mesh_of(1)
    x = placed(mesh, (source,))
    for target in (R, S0, S1, P):
        assert redistribution_plan(x, (target,)).steps == ()
        y = redistribute(x, (target,))
        assert placements_of(y) == (target,)
        np.testing.assert_array_equal(full_array(y), DENSE)


LAYOUTS = [(R, R), (S0, S0), (INNER, S0), (S1, S0), (P, P), (P, S0)]


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(LAYOUTS, 2)))
def test_transitions_on_two_axes(source, target):
    check_transition(mesh_of(2, 4), source, target)


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.permutations([(S0, S0), (INNER, S0), (R, S0), (S0, P)], 2))
)
def test_transitions_on_a_square_mesh(source, target):
    check_transition(mesh_of(2, 2), source, target)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((S0, S0), (R, R), ("all_gather",)),  # both axes in one
        ((INNER, S0), (R, R), ("all_gather",)),
        ((P, P), (R, R), ("all_reduce",)),
        ((P, P), (S0, S0), ("reduce_scatter",)),
        ((S0, S0), (S1, S1), ("all_to_all",)),
        ((S0, S0), (S0, R), ("all_gather",)),  # the inner axis alone
        ((S0, S0), (R, S0), ("collective_permute", "all_gather")),  # the outer axis: swap the nesting first
        ((S0, S0), (INNER, S0), ("collective_permute",)),
        ((S0, S1), (R, S1), ("all_gather",)),
        ((P, S0), (S1, S0), ("reduce_scatter",)),
    ],
)
def test_several_axes_go_together_and_nesting_is_respected(source, target, expected):
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    assert redistribution_plan(x, target, mesh_of(2, 4), source=source).collectives == expected


@pytest.mark.parametrize("size", [2, 4, 8])
def test_bytes_follow_the_ring_model(size):
    num_bytes = DENSE.size * 4
    x = jax.ShapeDtypeStruct(DENSE.shape, DENSE.dtype)

    def sent(source, target):
        return redistribution_plan(x, (target,), mesh_of(size), source=(source,)).sent_bytes

    assert sent(S0, R) == (size - 1) * num_bytes // size
    assert sent(P, S0) == (size - 1) * num_bytes // size
    assert sent(P, R) == 2 * (size - 1) * num_bytes // size
    assert sent(S0, S1) == (size - 1) * num_bytes // size // size
    assert sent(R, S0) == sent(R, P) == sent(S0, S0) == 0


def test_planned_bytes_are_those_of_the_compiled_program():
    mesh = mesh_of(2, 4)
    for source, target in [((S0, S0), (R, S0)), ((P, S0), (S0, R)), ((S1, S0), (S0, S1))]:
        x = placed(mesh, source)
        held = hold(x)
        program = compiled_plan(held.mesh, held.extent, held.layout, make_layout(target, held.mesh, 2))
        assert collectives(program, held.array).wire_bytes() == redistribution_plan(x, target).sent_bytes


def test_an_outer_axis_is_freed_without_the_whole_array():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan = redistribution_plan(x, (R, S0), mesh_of(2, 4), source=(S0, S0))
    assert max(np.prod(step.local_shape) for step in plan.steps) == 64 * 64 // 4


def test_a_plan_reads_well():
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    plan = redistribution_plan(x, (R, S0), mesh_of(2, 4), source=(S0, S0))
    assert str(plan) == (
        "float32[8, 16]: (dp S(0), tp S(0)) -> (dp R, tp S(0))\n"
        "  1. collective_permute dim 0 over dp tp      -> [1, 16] per device, sends 64 bytes\n"
        "  2. all_gather dim 0 over dp                 -> [2, 16] per device, sends 64 bytes\n"
        "  in all 2 collectives, 128 bytes sent by each device"
    )
    assert "nothing to do" in str(redistribution_plan(x, (S0, R), mesh_of(2, 4), source=(S0, R)))


def test_own_placements_cost_nothing():
    x = placed(mesh_of(2, 4), (S0, S1))
    with count_compilations() as compiled:
        assert redistribute(x, (S0, S1)) is x
        assert redistribute(x, (S0, Shard(-1))) is x
    assert compiled.count == 0


def test_a_second_call_does_not_compile():
    mesh = mesh_of(2, 4)
    x, other = placed(mesh, (S0, R)), placed(mesh, (S0, R), DENSE + 1)
    redistribute(x, (S1, R))
    with count_compilations() as compiled:
        y = redistribute(other, (S1, R))
    assert compiled.count == 0
    np.testing.assert_array_equal(y, DENSE + 1)


def test_a_slice_changes_its_own_axes_and_adds_inside():
    mesh = mesh_of(2, 4)
    x = distribute(DENSE, mesh["tp"], [S0])
    y = redistribute(x, [S0], mesh["dp"])
    assert y.sharding.spec[0] == ("tp", "dp")
    assert placements_of(y) == (INNER, S0)
    assert redistribute(y, [S0], mesh["dp"]) is y
    assert placements_of(redistribute(y, [S1], mesh["dp"])) == (S1, S0)
    assert placements_of(redistribute(y, [R], mesh["tp"])) == (S0, R)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, jnp.bool_])
def test_dtypes_travel_unchanged(dtype):
    mesh = mesh_of(4)
    value = jnp.asarray(DENSE % 3, dtype)
    y = redistribute(distribute(value, mesh, [S0]), [S1])
    assert y.dtype == dtype
    np.testing.assert_array_equal(full_array(y), value)


def test_explicit_meshes_are_served():
    plain = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Explicit,))
    x = distribute(DENSE, plain, [S0])
    y = redistribute(x, [S1])
    assert y.sharding.mesh == plain
    np.testing.assert_array_equal(y, DENSE)


def test_full_array_of_a_replicated_array_is_itself():
    x = distribute(DENSE, mesh_of(4), [R])
    assert full_array(x) is x
    np.testing.assert_array_equal(full_array(DENSE), DENSE)


def test_mistakes():
    mesh = mesh_of(2, 4)
    x = distribute(DENSE, mesh, (S0, R))
    with pytest.raises(PlacementError, match=r"does not lie on a mesh.*distribute\(x, mesh, placements\)"):
        redistribute(jnp.ones(8), [R])
    with pytest.raises(
        PlacementError, match=r"the array lies on DeviceMesh\(\(dp=2, tp=4\).*not on DeviceMesh\(\(dp=8"
    ):
        redistribute(x, [R], mesh_of(8))
    with pytest.raises(PlacementError, match=r"1 placements .* for the 2 axes"):
        redistribute(x, [R])
    with pytest.raises(PlacementError, match=r"source=... is for arrays inside jit"):
        redistribute(x, (R, R), source=(S0, R))
    with pytest.raises(PlacementError, match=r"redistribution_plan: x does not lie on a mesh"):
        redistribution_plan(jnp.ones(8), [R])
