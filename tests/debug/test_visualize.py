"""Golden text of layouts, well-formed SVG with one colour per cell, tables of models."""

import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar._errors import PlacementError
from jaxpar.debug import ShardingPicture, ShardingTable, visualize_sharding
from jaxpar.debug._layout import DimLayout, Layout
from jaxpar.mesh import init_device_mesh

MESH = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
_SVG = "{http://www.w3.org/2000/svg}"


def _array(shape: tuple[int, ...], spec: P) -> jax.Array:
    return jax.device_put(jnp.ones(shape), NamedSharding(MESH, spec))


_GOLDEN = {
    "matrix over both axes": (
        (8, 16),
        P("dp", "tp"),
        """\
float32[8, 16] P('dp', 'tp') on (dp=2, tp=4), 64 B per device
dim 0 @ dp | dim 1 @ tp  0:4  4:8  8:12  12:16
-----------------------  ---  ---  ----  -----
0:4                      0    1    2     3
4:8                      4    5    6     7""",
    ),
    "copies share a cell": (
        (8, 16),
        P(None, "dp"),
        """\
float32[8, 16] P(None, 'dp') on (dp=2, tp=4), 256 B per device, copies over tp
dim 0 | dim 1 @ dp  0:8      8:16
------------------  -------  -------
0:8                 0 1 2 3  4 5 6 7""",
    ),
    "both axes on one dim, minor first": (
        (8,),
        P(("tp", "dp")),
        """\
float32[8] P(('tp', 'dp')) on (dp=2, tp=4), 4 B per device
dim 0 @ tp, dp  devices
--------------  -------
0:1             0
1:2             4
2:3             1
3:4             5
4:5             2
5:6             6
6:7             3
7:8             7""",
    ),
    "scalar": (
        (),
        P(),
        """\
float32[] P() on (dp=2, tp=4), 4 B per device, copies over dp, tp
scalar  devices
------  ---------------
value   0 1 2 3 4 5 6 7""",
    ),
    "three dims": (
        (4, 3, 8),
        P("dp", None, "tp"),
        """\
float32[4, 3, 8] P('dp', None, 'tp') on (dp=2, tp=4), 48 B per device
dim 0 @ dp: 4, 2 pieces of 2
dim 1: 3, whole
dim 2 @ tp: 8, 4 pieces of 2""",
    ),
}


@pytest.mark.parametrize("name", _GOLDEN)
def test_golden_text(name: str) -> None:
    shape, spec, text = _GOLDEN[name]
    assert str(visualize_sharding(_array(shape, spec))) == text


def test_the_picture_agrees_with_the_array() -> None:
    x = _array((8, 16), P("tp", "dp"))
    picture = visualize_sharding(x)
    assert isinstance(picture, ShardingPicture)
    layout, devices = picture.layout, list(MESH.devices.flat)
    for (i, j), numbers in layout.cells.items():
        cut = [slice(*layout.dims[0].pieces[i], None), slice(*layout.dims[1].pieces[j], None)]
        held = {devices.index(s.device) for s in x.addressable_shards if list(s.index) == cut}
        assert set(numbers) == held


def test_sharding_alone_and_abstract_arrays() -> None:
    sharding = NamedSharding(MESH, P("tp"))
    assert str(visualize_sharding(sharding, shape=(8,))).startswith(
        "[8] P('tp') on (dp=2, tp=4), copies over dp"
    )
    abstract = jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=sharding)
    assert str(visualize_sharding(abstract)).startswith("bfloat16[8] P('tp') on (dp=2, tp=4), 4 B per device")


def test_partial_values_are_named() -> None:
    explicit = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(explicit, P("dp", None, unreduced={"tp"}))
    title = str(visualize_sharding(sharding, shape=(8, 4))).splitlines()[0]
    assert title.endswith("on (dp=2, tp=4), partial over tp")


def test_one_device_has_no_mesh() -> None:
    assert "SingleDeviceSharding on 1 device" in str(visualize_sharding(jnp.ones(2)))


@pytest.mark.parametrize(("spec", "num_colours"), [(P("dp", "tp"), 8), (P(None, "tp"), 4), (P(), 1)])
def test_svg_has_one_colour_per_cell(spec: P, num_colours: int) -> None:
    picture = visualize_sharding(_array((8, 16), spec))
    cells = [r for r in ElementTree.fromstring(picture.to_svg()).iter(f"{_SVG}rect") if r.get("stroke")]
    assert len(cells) == len({cell.get("fill") for cell in cells}) == num_colours
    texts = [t.text for t in ElementTree.fromstring(picture.to_svg()).iter(f"{_SVG}text")]
    assert "dim 1 @ tp" in texts if "tp" in spec else "dim 1" in texts


def test_svg_of_many_dims_and_of_scalars_is_well_formed() -> None:
    for x in (_array((4, 3, 8), P("dp", None, "tp")), _array((), P()), _array((8,), P(("dp", "tp")))):
        ElementTree.fromstring(visualize_sharding(x).to_svg())


def test_svg_of_a_large_mesh_stays_on_the_page_and_leaves_labels_out() -> None:
    pieces = tuple((k, k + 1) for k in range(64))
    layout = Layout(
        shape=(64, 64),
        dtype="float32",
        dims=(DimLayout(pieces, ("dp",)), DimLayout(pieces, ("tp",))),
        cells={(i, j): (64 * i + j,) for i in range(64) for j in range(64)},
        spec="P('dp', 'tp')",
        mesh="(dp=64, tp=64)",
        copied_over=(),
        partial_over=(),
        num_devices=4096,
        bytes_per_device=4,
    )
    svg = ElementTree.fromstring(ShardingPicture(layout).to_svg())
    assert int(svg.get("width") or 0) < 900
    assert len(list(svg.iter(f"{_SVG}text"))) == 3  # title and two captions


def test_table_of_a_module() -> None:
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    model.kernel.set_value(jax.device_put(model.kernel.get_value(), NamedSharding(MESH, P(None, "tp"))))
    model.bias.set_value(jax.device_put(model.bias.get_value(), NamedSharding(MESH, P("tp"))))
    table = visualize_sharding(model)
    assert isinstance(table, ShardingTable)
    assert str(table) == (
        "leaf    dtype    shape   per device  spec           bytes per device\n"
        "------  -------  ------  ----------  -------------  ----------------\n"
        "bias    float32  [8]     [2]         P('tp')                     8 B\n"
        "kernel  float32  [4, 8]  [4, 2]      P(None, 'tp')              32 B\n"
        "total            40                                             40 B"
    )
    assert (table.num_elements, table.bytes_per_device) == (40, 40)
    assert "<td>kernel</td>" in table._repr_html_()
    ElementTree.fromstring(table.to_svg())


def test_table_of_a_pytree_names_what_is_on_no_device() -> None:
    table = visualize_sharding({"w": _array((8,), P("tp")), "seed": 3, "data": np.ones(2)})
    assert isinstance(table, ShardingTable)
    assert table.unplaced == ("data", "seed")
    assert "not on a device" in str(table)


def test_show_prints_through_rich(capsys: pytest.CaptureFixture[str]) -> None:
    for target in (_array((8, 16), P("dp", "tp")), _array((4, 3, 8), P("dp")), {"w": _array((8,), P("tp"))}):
        visualize_sharding(target).show()
    out = capsys.readouterr().out
    assert "dim 0 @ dp | dim 1 @ tp" in out and "not" not in out


@pytest.mark.parametrize(
    ("target", "shape", "message"),
    [
        (np.ones(4), None, "ndarray has no sharding: it lies in this process' memory"),
        (NamedSharding(MESH, P("dp")), None, r"Write visualize_sharding\(sharding, shape=\(8, 16\)\)"),
        (NamedSharding(MESH.abstract_mesh, P("tp")), (8,), "over an abstract mesh, which names no devices"),
        (NamedSharding(MESH, P("tp")), (6,), r"shape \(6,\) does not fit"),
    ],
)
def test_mistakes_are_named(target: object, shape: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        visualize_sharding(target, shape=shape)
