"""Compiled for 64 H100s that are not here: the overlap fraction tells a good data-parallel step from a bad one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.debug import assert_collectives, collectives, memory, overlap, topology
from jaxpar.debug._topology import has_gpu_compiler
from jaxpar.mesh import init_device_mesh

pytestmark = pytest.mark.skipif(
    not has_gpu_compiler(), reason="needs XLA's GPU compiler, which needs no GPU: pip install 'jaxpar[aot]'"
)

LAYERS, WIDTH, LOCAL_BATCH = 12, 1024, 256
GRADIENT_BYTES = LAYERS * WIDTH * WIDTH * 2  # bfloat16
Step = Callable[[jax.Array, jax.Array], jax.Array]


def _mesh(num_devices: int) -> Mesh:
    devices = topology("h100", num_devices=num_devices)
    return init_device_mesh((num_devices,), ("dp",), devices=devices).jax_mesh


@jax.custom_vjp
def _sum_gradient(w: jax.Array) -> jax.Array:
    return w


def _sum_gradient_bwd(_: None, g: jax.Array) -> tuple[jax.Array]:
    return (lax.pcast(lax.psum(g, "dp"), "dp", to="varying"),)


_sum_gradient.defvjp(lambda w: (w, None), _sum_gradient_bwd)


def _loss(
    ws: jax.Array, x: jax.Array, prepare: Callable[[jax.Array], jax.Array], *, unroll: bool = False
) -> jax.Array:
    y, _ = lax.scan(lambda x, w: (jnp.tanh(x @ prepare(w)), None), x, ws, unroll=unroll)
    return (y * y).sum()


def _summed_at_the_end(ws: jax.Array, x: jax.Array) -> jax.Array:
    return lax.psum(jax.grad(_loss)(lax.pcast(ws, "dp", to="varying"), x, lambda w: w), "dp")


def _summed_layer_by_layer(ws: jax.Array, x: jax.Array) -> jax.Array:
    # Unrolled: in a loop, jax 0.12 waits for each sum where it began.
    return jax.grad(_loss)(lax.pcast(ws, "dp", to="varying"), x, _sum_gradient, unroll=True)


def _gathered_layer_by_layer(ws: jax.Array, x: jax.Array) -> jax.Array:
    return jax.grad(_loss)(ws, x, lambda w: lax.all_gather(w, "dp", tiled=True))


def _compiled(step: Step, mesh: Mesh, weights: P, out: P, **options: int) -> jax.stages.Compiled:
    f = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(weights, P("dp")), out_specs=out))
    ws = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, weights))
    rows = mesh.size * LOCAL_BATCH
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, P("dp")))
    return f.lower(ws, x).compile(options)


def test_one_sum_at_the_end_has_nothing_to_hide_behind() -> None:
    compiled = _compiled(_summed_at_the_end, _mesh(64), P(), P())
    assert_collectives(compiled, expected={("all_reduce", "dp"): 1}, bytes={"all_reduce": GRADIENT_BYTES})
    assert overlap(compiled).overlapped_fraction <= 0.1


@pytest.mark.parametrize("num_devices", [64, 4096])
def test_a_sum_per_layer_hides_behind_the_backward(num_devices: int) -> None:
    # out_specs stacks the (equal) gradients of all devices: the toy's custom_vjp types them as varying
    not_joined = {"xla_gpu_all_reduce_combine_threshold_bytes": 0}
    compiled = _compiled(_summed_layer_by_layer, _mesh(num_devices), P(), P("dp"), **not_joined)
    assert_collectives(
        compiled, expected={("all_reduce", "dp"): LAYERS}, bytes={"all_reduce": GRADIENT_BYTES}
    )
    report = overlap(compiled)
    assert (
        report.select("all_reduce", "dp").async_fraction >= 0.8
    )  # the last ones have nothing left to hide behind
    assert report.overlapped_fraction >= 0.8


def test_gathers_and_scatters_of_sharded_layers_are_counted_and_asynchronous() -> None:
    compiled = _compiled(_gathered_layer_by_layer, _mesh(64), P(None, "dp"), P(None, "dp"))
    table = collectives(compiled)
    assert {(row.kind, row.axis) for row in table} == {("all_gather", "dp"), ("reduce_scatter", "dp")}
    assert table.bytes("reduce_scatter") == GRADIENT_BYTES
    assert overlap(compiled).async_fraction > 0.9


def test_memory_per_device_is_exact_for_arguments() -> None:
    compiled = _compiled(_gathered_layer_by_layer, _mesh(64), P(None, "dp"), P(None, "dp"))
    assert memory(compiled).argument_bytes == GRADIENT_BYTES // 64 + LOCAL_BATCH * WIDTH * 2
