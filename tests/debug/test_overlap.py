"""The overlap fraction on small hand-written schedules, where the right answer can be seen."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar._errors import CommunicationCheckError
from jaxpar.debug import OverlapReport, overlap
from jaxpar.debug._flops import matmul_flops
from jaxpar.debug._hlo import parse_module
from jaxpar.mesh import init_device_mesh

MESH = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
_HEADER = "HloModule m, is_scheduled=true, num_partitions=8\n"
_ADD = "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n  ROOT %s = f32[] add(%a, %b)\n}\n"
_GEMM = "%gemm (l: f32[8,16], r: f32[16,4]) -> f32[8,4] {\n  %l = f32[8,16] parameter(0)\n  %r = f32[16,4] parameter(1)\n  ROOT %d = f32[8,4] dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"
_WRAPPED = "%wrapped (w: f32[64]) -> f32[16] {\n  %w = f32[64] parameter(0)\n  ROOT %rs = f32[16] reduce-scatter(%w), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add\n}\n"
_PARAMETERS = "  %x = f32[64] parameter(0)\n  %l = f32[8,16] parameter(1)\n  %r = f32[16,4] parameter(2)\n"
_DOT = "  %dot = f32[8,4] fusion(%l, %r), kind=kCustom, calls=%gemm\n"
_GEMM_FLOPS = 2 * 8 * 4 * 16


def _schedule(*lines: str) -> str:
    body = _PARAMETERS + "".join(lines)
    return f"{_HEADER}{_ADD}{_GEMM}{_WRAPPED}ENTRY %e (x: f32[64], l: f32[8,16], r: f32[16,4]) -> f32[] {{\n{body}}}\n"


def _read(*lines: str) -> OverlapReport:
    return overlap(_schedule(*lines), mesh=MESH)


def _start(name: str, extra: str = "") -> str:
    return (
        f"  %{name} = f32[64] all-reduce-start(%x), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add{extra}\n"
    )


def _done(name: str) -> str:
    return f"  %{name}.done = f32[64] all-reduce-done(%{name})\n"


def test_a_matmul_between_start_and_done_overlaps() -> None:
    report = _read(_start("ar"), _DOT, _done("ar"))
    (row,) = report.rows
    assert (row.collective.kind, row.collective.axis, row.collective.bytes) == ("all_reduce", "dp", 256)
    assert (row.is_async, row.matmul_flops) == (True, _GEMM_FLOPS)
    assert (report.async_fraction, report.overlapped_fraction) == (1, 1)


def test_a_matmul_before_or_after_does_not() -> None:
    for lines in ((_DOT, _start("ar"), _done("ar")), (_start("ar"), _done("ar"), _DOT)):
        report = _read(*lines)
        assert (report.async_fraction, report.overlapped_fraction) == (1, 0)


def test_what_is_marked_sync_is_not_async() -> None:
    marked = ', backend_config={"collective_backend_config":{"is_sync":true}}'
    report = _read(_start("ar", marked), _DOT, _done("ar"))
    assert (report.async_fraction, report.overlapped_fraction) == (0, 0)


def test_bytes_weigh_the_fraction_and_select_narrows_it() -> None:
    gather = "  %ag = f32[256] all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}\n"
    report = _read(_start("ar"), _DOT, _done("ar"), gather)
    assert report.total_bytes == 256 + 1024
    assert report.overlapped_fraction == 256 / 1280
    assert (
        report.select("all_reduce").overlapped_fraction == report.select(axis="dp").overlapped_fraction == 1
    )
    assert report.select("all_gather", "tp").async_fraction == 0
    assert math.isnan(report.select("all_to_all").overlapped_fraction)


def test_wrapped_start_update_done_chain() -> None:
    report = _read(
        "  %s = ((f32[64]), f32[16]) async-start(%x), calls=%wrapped\n",
        "  %u = ((f32[64]), f32[16]) async-update(%s)\n",
        _DOT,
        "  %d = f32[16] async-done(%u)\n",
    )
    (row,) = report.rows
    assert (row.collective.kind, row.collective.axis, row.matmul_flops) == (
        "reduce_scatter",
        "tp",
        _GEMM_FLOPS,
    )


def test_two_in_flight_share_the_matmul() -> None:
    report = _read(_start("a"), _start("b"), _DOT, _done("a"), _done("b"))
    assert [row.matmul_flops for row in report.rows] == [_GEMM_FLOPS] * 2


def test_unscheduled_text_is_refused() -> None:
    with pytest.raises(CommunicationCheckError, match="no is_scheduled=true in its header"):
        overlap(_schedule(_start("ar")).replace("is_scheduled=true, ", ""))


def test_cpu_programs_never_overlap() -> None:
    f = jax.shard_map(lambda x: lax.psum(x @ x, "tp"), mesh=MESH, in_specs=P(), out_specs=P())
    report = overlap(f, jnp.ones((8, 8)))
    assert report.async_fraction == report.overlapped_fraction == 0
    assert "0% asynchronous, 0% with a matmul between start and done" in str(report)


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        (
            '(f32[8,4], s8[9]) custom-call(%l, %r), custom_call_target="__cublas$gemm", backend_config='
            '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
            _GEMM_FLOPS,
        ),
        # 2 images of 6x6x3, 5 filters of 3x3x3, "same" padding: 2 * (2*6*6*5) * (3*3*3)
        (
            "f32[2,6,6,5] convolution(%i, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            19440,
        ),
        (
            "(f32[3,3,3,5], u8[0]) custom-call(%i, %o), window={size=3x3}, dim_labels=b01f_01io->b01f, "
            'custom_call_target="__cudnn$convBackwardFilter"',
            19440,
        ),
        ("f32[8,16] add(%l, %l)", 0),
    ],
)
def test_matmul_flops(line: str, flops: int) -> None:
    more = "  %i = f32[2,6,6,3] parameter(3)\n  %k = f32[3,3,3,5] parameter(4)\n  %o = f32[2,6,6,5] parameter(5)\n"
    module = parse_module(_schedule(more, f"  ROOT %it = {line}\n"))
    entry = module.computations["e"]
    assert matmul_flops(module, entry, entry.root) == flops


def test_matmul_flops_of_loops_are_multiplied_out() -> None:
    f = jax.jit(lambda w, x: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=7)[0])
    module = parse_module(f.lower(jnp.ones((8, 8)), jnp.ones((4, 8))).compile().as_text() or "")
    entry = module.computations[module.entry]
    assert sum(matmul_flops(module, entry, i) for i in entry.instructions) == 7 * 2 * 4 * 8 * 8
