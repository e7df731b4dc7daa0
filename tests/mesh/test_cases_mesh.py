"""Faults that users of this kind of software met and reported, as inputs for jaxpar (cases MESH-1 to MESH-4)."""

import jax
import numpy as np
import pytest

from jaxpar._errors import MeshError, PlacementError
from jaxpar.debug import collectives
from jaxpar.mesh import (
    Replicate,
    Shard,
    distribute,
    full_array,
    init_device_mesh,
    redistribute,
    redistribution_plan,
    to_local,
)
from jaxpar.mesh._move import compiled_plan
from jaxpar.mesh._placed import hold


def line(size: int):
    return init_device_mesh((size,), ("x",), devices=jax.devices()[:size])


def square():
    return init_device_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])


def test_mesh_1a_gathering_an_uneven_dim_leaves_no_padding():
    value = np.arange(50.0, dtype=np.float32).reshape(5, 10)
    x = distribute(value, line(4), [Replicate()])
    x = redistribute(x, [Shard(0)], pad=True)
    assert [piece.shape[0] for piece in to_local(x)] == [2, 2, 1, 0]
    x = redistribute(x, [Replicate()])
    assert x.shape == (5, 10)
    np.testing.assert_array_equal(x, value)


@pytest.mark.parametrize(("shape", "mean"), [((3, 4), 5.5), ((1, 4), 1.5)])
def test_mesh_1bc_a_mean_counts_elements_and_not_ranks(shape, mean):
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert distribute(value, line(2), [Shard(0)], pad=True).mean() == mean


def test_mesh_2a_a_negative_dim_is_its_positive_twin():
    x = distribute(np.ones((4, 8)), line(4), [Shard(1)])
    y = redistribute(x, [Shard(-1)])
    assert y is x and to_local(y)[0].shape == (4, 2)
    held = hold(x)
    assert not len(collectives(compiled_plan(held.mesh, held.extent, held.layout, held.layout), held.array))


def test_mesh_2b_one_placement_object_for_arrays_of_two_ranks():
    last = Shard(-1)
    mesh = line(4)
    assert to_local(distribute(np.ones((4, 8)), mesh, [last]))[0].shape == (4, 2)
    assert to_local(distribute(np.ones((2, 3, 8)), mesh, [last]))[0].shape == (2, 3, 2)
    assert last == Shard(-1)


def test_mesh_2c_a_dim_too_far_is_named():
    with pytest.raises(PlacementError, match=r"dim -3 does not exist in an array of rank 2"):
        distribute(np.ones((4, 8)), line(4), [Shard(-3)])


def test_mesh_3a_groups_of_a_flattened_slice():
    mesh = init_device_mesh((2, 2, 2), ("dp", "cp", "tp"))
    groups = mesh["dp", "cp"].flatten().groups()
    assert [set(group) for group in groups] == [{0, 2, 4, 6}, {1, 3, 5, 7}]


def test_mesh_3b_names_out_of_order_are_refused():
    with pytest.raises(MeshError, match=r"Axis order \('tp', 'dp'\) is not the order of the mesh"):
        init_device_mesh((2, 2, 2), ("dp", "cp", "tp"))["tp", "dp"]


def test_mesh_3c_a_flattened_axis_among_axes_of_size_one():
    mesh = init_device_mesh((1, 1, 1, 1), ("d1", "d2", "d3", "d4"), devices=jax.devices()[:1])
    assert mesh.flatten(("d2", "d3"), name="d23")["d1", "d23", "d4"].shape == (1, 1, 1)


def test_mesh_3d_unknown_and_repeated_names_are_named():
    mesh = init_device_mesh((2, 2, 2), ("dp", "cp", "tp"))
    with pytest.raises(MeshError, match=r"Axis 'pp' is not in"):
        mesh["pp"]
    with pytest.raises(MeshError, match=r"Axis 'dp' is named twice"):
        mesh["dp", "dp"]


@pytest.mark.parametrize(
    ("length", "locals_"),
    [
        (8, [[0, 1], [4, 5], [2, 3], [6, 7]]),
        (5, [[0, 1], [3], [2], [4]]),
        (7, [[0, 1], [4, 5], [2, 3], [6]]),
    ],
)
def test_mesh_4_tensor_then_data_parallel_on_one_dim(length, locals_):
    mesh = square()
    x = distribute(np.arange(length), mesh["tp"], [Shard(0)], pad=True)
    x = redistribute(x, [Shard(0)], mesh["dp"], pad=True)
    assert [piece.tolist() for piece in to_local(x)] == locals_
    assert full_array(x).tolist() == list(range(length))
    state = np.asarray(full_array(x))  # through a full state dict and back
    again = distribute(state, mesh, (Shard(0, after=("tp",)), Shard(0)), pad=True)
    assert [piece.tolist() for piece in to_local(again)] == locals_


def test_mesh_4_the_order_of_nesting_is_kept_in_the_plan():
    x = redistribute(distribute(np.arange(8), square()["tp"], [Shard(0)]), [Shard(0)], square()["dp"])
    assert redistribution_plan(x, (Replicate(), Replicate())).collectives == ("all_gather",)
    assert redistribution_plan(x, (Replicate(), Shard(0))).collectives == ("all_gather",)
    assert redistribution_plan(x, (Shard(0), Shard(0))).collectives == ("collective_permute",)
