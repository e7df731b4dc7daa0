"""The report says what the arrays say: bytes on every device, placements, and a reason for each exception."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.fsdp import ShardingReport, fully_shard, sharding_report
from jaxpar.mesh import Replicate, Shard, init_device_mesh


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(8, 12, rngs=rngs)
        self.odd = nnx.Param(jnp.ones((5, 3)))
        self.small = nnx.Param(jnp.ones(3, jnp.bfloat16))
        self.gate = nnx.Param(jnp.float32(0.5))
        self.head = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.tied = self.head.kernel
        self.norm = nnx.BatchNorm(4, use_bias=False, use_scale=False, rngs=rngs)  # no parameters

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


NUM_PARAMETERS = 8 * 12 + 12 + 15 + 3 + 1 + 16


def dp(model: Model) -> None:
    fully_shard(model, mesh(4), ignored_params=["linear.bias"], pad_above_bytes=16)


def hsdp(model: Model) -> None:
    fully_shard(model, mesh(2, 4), pad_above_bytes=16)


def tp(model: Model) -> None:
    on = init_device_mesh((2, 4), ("dp", "tp"))
    value, sharding = model.linear.kernel.get_value(), NamedSharding(on.jax_mesh, P("tp"))
    is_abstract = isinstance(value, jax.ShapeDtypeStruct)
    put = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding) if is_abstract else None
    model.linear.kernel.set_value(put or jax.device_put(value, sharding))
    fully_shard(model, on["dp"])


def mesh(*sizes: int) -> Any:
    num = int(np.prod(sizes))
    return init_device_mesh(sizes, ("replica", "dp")[-len(sizes) :], devices=jax.devices()[:num])


LAYOUTS = [dp, hsdp, tp]


def held_by_each_device(module: nnx.Module, kind: Any) -> dict[Any, int]:
    held: dict[Any, int] = {}
    for x in jax.tree.leaves(nnx.state(module, kind)):
        for shard in x.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held


@pytest.mark.parametrize("parallelize", LAYOUTS)
def test_bytes_per_device_are_those_of_the_arrays(parallelize: Callable[[Model], Any]) -> None:
    model = Model()
    parallelize(model)
    report = sharding_report(model)
    held = held_by_each_device(model, nnx.Param)
    assert len(held) == (4 if parallelize is dp else 8)
    assert set(held.values()) == {report.bytes_per_device}
    assert report.num_parameters == NUM_PARAMETERS
    assert report.bytes == sum(x.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize("parallelize", [dp, hsdp])
def test_bytes_per_device_are_one_nth_and_the_rest(parallelize: Callable[[Model], Any]) -> None:
    model = Model()
    parallelize(model)
    report = sharding_report(model)
    sharded = report.bytes - report.replicated_bytes
    assert report.replicated_bytes == 6 + 4 + (12 * 4 if parallelize is dp else 0)
    assert {sharded // 4 + report.replicated_bytes} == set(held_by_each_device(model, nnx.Param).values())


def test_rows_tell_shape_placements_and_reason() -> None:
    model = Model()
    dp(model)
    rows = {row.name: row for row in sharding_report(model).rows}
    assert list(rows) == ["gate", "head.kernel", "linear.bias", "linear.kernel", "odd", "small"]
    replicated, sharded = (("dp", Replicate()),), (("dp", Shard(0)),)
    assert (rows["linear.kernel"].placements, rows["linear.kernel"].reason) == (sharded, "")
    assert (rows["linear.bias"].placements, rows["linear.bias"].reason) == (replicated, "ignored")
    assert (rows["gate"].placements, rows["gate"].reason) == (replicated, "a scalar has no dim")
    assert rows["small"].reason == "no dim of [3] divides by 4; smaller than pad_above_bytes=16"
    odd = rows["odd"]
    assert (odd.shape, odd.size, odd.stored_bytes, odd.bytes_per_device) == ((5, 3), 15, 64, 16)
    assert (odd.is_flat, odd.placements) == (True, sharded)
    assert odd.reason.startswith("no dim of [5, 3] divides by 4: stored flat and padded")


def test_axes_of_other_parallelism_are_told_too() -> None:
    model = Model()
    tp(model)
    rows = {row.name: row for row in sharding_report(model).rows}
    assert rows["linear.kernel"].placements == (("dp", Shard(0, after=("tp",))), ("tp", Shard(0)))
    assert rows["linear.kernel"].num_parts == 8


@pytest.mark.parametrize("parallelize", LAYOUTS)
def test_abstract_models_are_reported_alike(parallelize: Callable[[Model], Any]) -> None:
    model, abstract = Model(), nnx.eval_shape(Model)
    for each in (model, abstract):
        parallelize(each)
    assert sharding_report(abstract) == sharding_report(model)


def test_what_no_unit_reaches_says_so() -> None:
    model = Model()
    fully_shard(model.linear, mesh(4))
    rows = {row.name: row for row in sharding_report(model).rows}
    assert rows["odd"].reason == "not below any unit" and rows["odd"].placements == ()
    assert rows["linear.kernel"].reason == ""
    model.linear.kernel.set_value(jnp.ones((8, 12)))
    (row,) = (row for row in sharding_report(model).rows if row.name == "linear.kernel")
    assert row.reason == "its array is not split over dp" and row.num_parts == 1


def test_optimizer_state_is_reported_with_its_parameters_reasons() -> None:
    model = Model()
    dp(model)
    rows = {
        row.name: row for row in sharding_report(nnx.Optimizer(model, optax.adam(1.0), wrt=nnx.Param)).rows
    }
    parameters = {row.name: row for row in sharding_report(model).rows}
    assert len(rows) == 2 * len(parameters) + 2
    for name, row in parameters.items():
        moment = rows[f"opt_state.0.mu.{name}"]
        assert (moment.shape, moment.placements, moment.num_parts, moment.reason) == (
            row.shape,
            row.placements,
            row.num_parts,
            row.reason,
        )
    assert rows["step"].reason == "belongs to no parameter below a unit"


def test_it_prints_in_a_terminal_and_a_notebook_and_as_json() -> None:
    model = Model()
    dp(model)
    report = sharding_report(model)
    assert str(report).splitlines()[6:] == [
        "odd             [5, 3]    float32    flat dp S(0)         16 B   no dim of [5, 3] divides by 4: stored flat and "
        "padded, one dim for the optimizer",
        "small           [3]       bfloat16   dp R                  6 B   no dim of [3] divides by 4; smaller than "
        "pad_above_bytes=16",
        "-" * 145,
        "total           143                  570 B in all        186 B   58 B whole on every device",
    ]
    assert repr(report) == str(report) and str(report).isascii()
    bundle = report._repr_mimebundle_()
    assert "linear.kernel" in bundle["text/html"] and "[8, 12]" in bundle["text/plain"]
    assert report.to_dicts()[0] == {
        "name": "gate",
        "shape": (),
        "dtype": "float32",
        "placements": {"dp": "R"},
        "is_flat": False,
        "stored_bytes": 4,
        "num_parts": 1,
        "bytes_per_device": 4,
        "reason": "a scalar has no dim",
    }
    assert str(ShardingReport(())).splitlines()[-1].split()[:2] == ["total", "0"]


def test_show_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    sharding_report(model).show()
    assert re.search(r"linear\.kernel .*\[8, 12\]", capsys.readouterr().out)


def test_its_text_is_text_within_jupyter_too(monkeypatch: pytest.MonkeyPatch) -> None:
    report = sharding_report(Model())
    text = str(report)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # such consoles display instead of writing
    assert str(report) == text
