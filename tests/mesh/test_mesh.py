"""DeviceMesh: coordinates, views, groups, reshaping, and what each mistake is told (parity rows M1-M7, M9, M12)."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxpar._errors import MeshError
from jaxpar.mesh import DeviceMesh, as_device_mesh, as_jax_mesh, axes_of, axis_size, init_device_mesh

SHAPES = [(8,), (1, 8), (2, 4), (4, 2), (2, 2, 2), (1, 8, 1), (2, 1, 4)]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(shape, tuple("abcd"[: len(shape)]))


@pytest.mark.parametrize("shape", SHAPES)
def test_rank_is_the_row_major_index_of_its_coordinate(shape):
    mesh = mesh_of(shape)
    for rank, device in enumerate(mesh.jax_mesh.devices.flat):
        coordinate = mesh.coordinate(rank)
        assert np.ravel_multi_index(coordinate, shape) == rank
        assert mesh.coordinate(device) == coordinate


@pytest.mark.parametrize("shape", SHAPES)
def test_groups_of_any_axes_partition_the_ranks(shape):
    mesh = mesh_of(shape)
    for length in range(1, len(shape) + 1):
        for axes in itertools.combinations(mesh.axis_names, length):
            groups = mesh.groups(axes)
            assert sorted(rank for group in groups for rank in group) == list(range(8))
            assert {len(group) for group in groups} == {mesh.size(axes)}


def test_a_group_differs_in_its_own_axis_only():
    mesh = mesh_of((2, 2, 2))
    for group in mesh.groups("b"):
        others = {mesh["a", "c"].coordinate(rank) for rank in group}
        assert len(others) == 1


def test_a_slice_is_a_view_of_the_whole_mesh():
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    view = mesh["tp"]
    assert view.jax_mesh is mesh.jax_mesh
    assert (view.axis_names, view.shape, view.ndim, view.size()) == (("tp",), (4,), 1, 4)
    assert view.coordinate(6) == (2,)
    assert mesh["dp", "tp"]["tp"] == view
    assert view != mesh and len({mesh, view, mesh["tp"]}) == 2


def test_this_process_stands_at_its_first_device():
    mesh = init_device_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[4:])
    assert mesh.coordinate() == mesh.get_coordinate() == (0, 0)
    assert mesh.local_coordinates() == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert mesh.get_local_rank("tp") == mesh["tp"].get_local_rank() == 0
    assert mesh.coordinate(jax.devices()[0]) is None
    assert mesh.coordinate(7) is None


def test_a_process_outside_the_mesh_has_no_coordinate(monkeypatch):
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert mesh.coordinate() is None and mesh.get_local_rank("tp") is None and mesh.local_coordinates() == ()


@pytest.mark.parametrize(
    ("shape", "axes", "repr_"),
    [
        ((2, 4), None, "DeviceMesh((dp=2, tp=4), 'cpu', devices=8)"),
        ((2, 4), "tp", "DeviceMesh((tp=4)) of DeviceMesh((dp=2, tp=4), 'cpu', devices=8)"),
        ((1, 8), ("dp", "tp"), "DeviceMesh((dp=1, tp=8), 'cpu', devices=8)"),
    ],
)
def test_repr_tells_all(shape, axes, repr_):
    mesh = init_device_mesh(shape, ("dp", "tp"))
    assert repr(mesh if axes is None else mesh[axes]) == repr_


def test_minus_one_takes_what_the_others_leave():
    assert init_device_mesh((2, -1, 2), ("a", "b", "c")).shape == (2, 2, 2)
    assert init_device_mesh(-1, "a").shape == (8,)


def test_devices_keep_the_order_they_are_given_in():
    reversed_devices = jax.devices()[::-1]
    for devices in (reversed_devices, np.asarray(reversed_devices).reshape(2, 4)):
        mesh = init_device_mesh((2, 4), ("dp", "tp"), devices=devices)
        assert list(mesh.jax_mesh.devices.flat) == reversed_devices


def test_axes_are_auto():
    assert set(init_device_mesh((2, 4), ("dp", "tp")).jax_mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1), (2, -1)])
def test_flatten_undoes_unflatten(sizes):
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    split = mesh.unflatten("tp", sizes, ("x", "y"))
    assert split.axis_names == ("dp", "x", "y")
    assert split.flatten(("x", "y"), name="tp") == mesh


def test_flatten_keeps_the_other_axes_and_counts_row_major():
    mesh = init_device_mesh((2, 2, 2), ("dp", "cp", "tp"))
    assert mesh.flatten(("dp", "cp")).axis_names == ("dp_cp", "tp")
    assert mesh["dp", "cp"].flatten().axis_names == ("dp_cp",)
    assert mesh["dp", "tp"].flatten().groups("dp_tp") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.flatten(name="all").groups("all") == (tuple(range(8)),)


def test_submeshes_cover_every_device_once_and_keep_ranks():
    mesh = init_device_mesh((2, 2, 2), ("pp", "dp", "tp"))
    stages = mesh.submeshes(("dp", "tp"))
    assert [stage.ranks for stage in stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [stage.shape for stage in stages] == [(2, 2), (2, 2)]
    assert stages[1].groups("tp") == ((4, 5), (6, 7))
    devices = [device for stage in stages for device in stage.jax_mesh.devices.flat]
    assert devices == list(mesh.jax_mesh.devices.flat)
    assert stages[1].coordinate(0) is None


def test_plain_meshes_are_taken_everywhere():
    plain = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    assert as_jax_mesh(plain) is plain
    assert as_device_mesh(plain) == init_device_mesh((2, 4), ("dp", "tp"))
    assert axes_of(plain) == ("dp", "tp")
    assert axis_size(plain, ("tp", "dp")) == 8
    view = as_device_mesh(plain)["tp"]
    assert (as_jax_mesh(view), as_device_mesh(view), axes_of(view)) == (plain, view, ("tp",))


def test_an_unknown_axis_is_named_with_the_nearest():
    mesh = init_device_mesh((2, 4), ("data", "tensor"))
    for ask in (
        lambda: mesh["date"],
        lambda: axis_size(mesh, "date"),
        lambda: mesh.groups("date"),
        lambda: axis_size(as_jax_mesh(mesh), "date"),
    ):
        with pytest.raises(
            MeshError, match=r"Axis 'date' is not in .*\('data', 'tensor'\)\. Did you mean 'data'\?"
        ):
            ask()
    with pytest.raises(MeshError, match=r"'data' is not in DeviceMesh\(\(tensor=4\)\) of"):
        mesh["tensor"]["data"]


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (("tp", "dp"), r"Axis order \('tp', 'dp'\) is not the order of the mesh.*Write \('dp', 'tp'\)"),
        (("tp", "tp"), r"Axis 'tp' is named twice"),
        ((), r"No axis named"),
    ],
)
def test_bad_slices(select, message):
    with pytest.raises(MeshError, match=message):
        init_device_mesh((2, 4), ("dp", "tp"))[select]


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        (
            (2, 2),
            ("a", "b"),
            r"a=2 \* b=2 = 4 devices, but jax.devices\(\) has 8.*devices=jax.devices\(\)\[:4\]",
        ),
        ((16,), ("a",), r"a=16 = 16 devices, but jax.devices\(\) has 8.*jax_num_cpu_devices\", 16"),
        ((2, 4), ("a",), r"2 sizes \(2, 4\) for 1 axis names"),
        ((-1, -1), ("a", "b"), r"shape \(-1, -1\) is not possible"),
        ((0, 8), ("a", "b"), r"shape \(0, 8\) is not possible"),
        (
            (3, -1),
            ("a", "b"),
            r"-1 in shape \(3, -1\) cannot be inferred: the number of devices is 8, and 8 / 3",
        ),
        ((2, 4), ("a", "a"), r"axis name 'a' is given twice"),
        ((2, 4), ("a", ""), r"axis name '' is not an identifier"),
        ((2, 4), ("a", "t p"), r"axis name 't p' is not an identifier"),
    ],
)
def test_bad_shapes_and_names(shape, names, message):
    with pytest.raises(MeshError, match=message):
        init_device_mesh(shape, names)


def test_bad_devices():
    first = jax.devices()[0]
    with pytest.raises(MeshError, match=r"devices\[0\] and devices\[1\] are the same device"):
        init_device_mesh((2,), ("a",), devices=[first, first])
    with pytest.raises(MeshError, match=r"a=2 = 2 devices, but devices has 4.*devices=devices\[:2\]"):
        init_device_mesh((2,), ("a",), devices=jax.devices()[:4])


def test_bad_reshaping():
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    with pytest.raises(MeshError, match=r"flatten: axis name 'tp' is taken"):
        mesh.unflatten("dp", (2, 1), ("x", "y")).flatten(("x", "y"), name="tp")
    with pytest.raises(MeshError, match=r"unflatten: axis name 'dp' is taken"):
        mesh.unflatten("tp", (2, 2), ("dp", "x"))
    with pytest.raises(MeshError, match=r"unflatten.*\(3, 2\).*6.*'tp'.*4"):
        mesh.unflatten("tp", (3, 2), ("x", "y"))


def test_bad_ranks_and_local_rank():
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    with pytest.raises(MeshError, match=r"ranks=\(0, 0\) does not number the 8 devices"):
        DeviceMesh(mesh.jax_mesh, ranks=(0, 0))
    with pytest.raises(MeshError, match=r"get_local_rank\(\) needs an axis.*get_local_rank\('dp'\)"):
        mesh.get_local_rank()
