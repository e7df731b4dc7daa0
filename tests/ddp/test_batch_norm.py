"""Synchronised BatchNorm: statistics of the global batch, weighted by counts (case DDP-1)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.ddp import DistributedDataParallel, convert_sync_batchnorm
from jaxpar.debug import assert_collectives
from jaxpar.mesh import init_device_mesh


def _mesh(num_ranks: int) -> Any:
    return init_device_mesh((num_ranks,), ("dp",), devices=jax.devices()[:num_ranks])


def _norm(num_features: int = 3, **options: Any) -> nnx.BatchNorm:
    norm = nnx.BatchNorm(num_features, rngs=nnx.Rngs(0), momentum=0.75, **options)
    rng = np.random.default_rng(1)
    for p in (norm.scale, norm.bias):
        if p is not None:
            p.set_value(jnp.asarray(rng.normal(size=num_features), p.dtype))
    return norm


def _on_ranks(norm: nnx.BatchNorm, mesh: Any) -> Any:
    """(x, mask, weight) of the global batch -> output, running mean and variance, gradients, all in global form."""
    graphdef, params, stats = nnx.split(norm, nnx.Param, ...)

    def local(params: Any, stats: Any, x: jax.Array, mask: jax.Array | None, weight: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array) -> Any:
            norm = nnx.merge(graphdef, params, stats, copy=True)
            y = norm(x, mask=mask)
            return lax.psum((y * weight).sum(), "dp"), (y, norm.mean[...], norm.var[...])

        (_, (y, mean, variance)), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return y, mean, variance, grads

    out_specs = (P("dp"), P(), P(), (P(), P("dp")))
    mapped = jax.shard_map(
        local, mesh=mesh.jax_mesh, in_specs=(P(), P(), P("dp"), P("dp"), P("dp")), out_specs=out_specs
    )
    return jax.jit(lambda x, mask, weight: mapped(params, stats, x, mask, weight))


def _on_one_device(norm: nnx.BatchNorm, x: Any, mask: Any, weight: Any) -> Any:
    graphdef, params, stats = nnx.split(norm, nnx.Param, ...)

    def loss(params: Any, x: jax.Array) -> Any:
        norm = nnx.merge(graphdef, params, stats, copy=True)
        y = norm(x, mask=mask)
        return (y * weight).sum(), (y, norm.mean[...], norm.var[...])

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    return *out, grads


@pytest.mark.parametrize("use_fast_variance", [True, False])
def test_ranks_are_weighed_by_their_number_of_samples(use_fast_variance: bool) -> None:
    """DDP-1: rank 0 holds 1, 2, 3, rank 1 holds 10, rank 2 holds nothing."""
    x = jnp.array([1.0, 2.0, 3.0, 10.0, 77.0, 77.0, 77.0, 77.0, 77.0])[:, None]
    real = jnp.arange(9) < 4
    norm = nnx.BatchNorm(
        1,
        momentum=0.0,
        use_bias=False,
        use_scale=False,
        use_fast_variance=use_fast_variance,
        rngs=nnx.Rngs(0),
    )
    run = _on_ranks(convert_sync_batchnorm(norm, _mesh(3)), _mesh(3))
    y, mean, variance, _ = run(x, real[:, None], jnp.ones_like(x))
    assert (mean.tolist(), variance.tolist()) == ([4.0], [12.5])  # Flax's biased variance, as the docs say
    for shard in mean.addressable_shards + variance.addressable_shards:
        assert shard.data.tolist() in ([4.0], [12.5])
    np.testing.assert_allclose(y[:4, 0], (x[:4, 0] - 4) / np.sqrt(12.5 + 1e-5), rtol=1e-6)

    y, mean, variance, (_, grad) = run(x, jnp.zeros_like(real)[:, None], jnp.ones_like(x))  # all ranks empty
    assert (mean.tolist(), variance.tolist()) == ([0.0], [1.0])  # unchanged
    assert np.isfinite(y).all() and np.isfinite(grad).all()


@pytest.mark.parametrize(
    ("shape", "masked", "options", "num_ranks"),
    [
        ((8, 3), (8, 1), {"use_fast_variance": False}, 2),
        ((8, 3), (8, 3), {"use_scale": False}, 2),  # a mask per feature
        ((8, 2, 2, 3), None, {"use_bias": False}, 8),
        ((4, 3, 5), (5,), {"axis": 1}, 2),
        ((8, 3), None, {"dtype": jnp.bfloat16}, 2),
        ((8, 3), (8, 1), {}, 1),
    ],
)
def test_equal_to_flax_on_the_union_batch(
    shape: tuple[int, ...], masked: tuple[int, ...] | None, options: dict[str, Any], num_ranks: int
) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(1, 2, shape), jnp.float32)
    weight = jnp.asarray(rng.normal(size=shape), jnp.float32)
    mask = None if masked is None else jnp.asarray(rng.uniform(size=masked) < 0.6)
    if masked == (5,):
        mask = jnp.broadcast_to(mask, shape)
    got = _on_ranks(convert_sync_batchnorm(_norm(**options), _mesh(num_ranks)), _mesh(num_ranks))(
        x, mask, weight
    )
    expected = _on_one_device(_norm(**options), x, mask, weight)
    assert got[0].dtype == expected[0].dtype
    rtol = 1e-5
    if options.get(
        "dtype"
    ):  # outputs are rounded to bfloat16 at the end; gradients are sums of rounded numbers
        rtol, got, expected = 2**-7, got[:3], expected[:3]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-6), got, expected)


@pytest.mark.parametrize(("options", "forward"), [({}, 1), ({"use_fast_variance": False}, 2)])
def test_collectives_forward_and_backward(options: dict[str, Any], forward: int) -> None:
    """Forward: sum, squares and count of 3 features in one vector (or in two); backward: two gradients of 3."""
    mesh = _mesh(2)
    graphdef, state = nnx.split(
        convert_sync_batchnorm(_norm(use_scale=False, use_bias=False, **options), mesh)
    )

    def energy(x: jax.Array) -> jax.Array:
        local = jax.shard_map(
            lambda x: nnx.merge(graphdef, state, copy=True)(x) ** 3,
            mesh=mesh.jax_mesh,
            in_specs=P("dp"),
            out_specs=P("dp"),
        )
        return local(x).sum()

    x = jax.device_put(jnp.ones((4, 3)), jax.sharding.NamedSharding(mesh.jax_mesh, P("dp")))
    f = jax.jit(jax.grad(energy))
    table = assert_collectives(f, x, expected={("all_reduce", "dp"): forward + 1}, mesh=mesh)
    assert sorted(row.bytes for row in table) == sorted(
        [4 * 6] + ([4 * 7] if forward == 1 else [4 * 4, 4 * 3])
    )


def test_running_averages_need_no_communication() -> None:
    mesh = _mesh(2)
    norm = convert_sync_batchnorm(_norm(), mesh)
    graphdef, state = nnx.split(norm)
    f = jax.shard_map(
        lambda x: nnx.merge(graphdef, state, copy=True)(x, use_running_average=True),
        mesh=mesh.jax_mesh,
        in_specs=P("dp"),
        out_specs=P("dp"),
    )
    x = jnp.arange(12.0).reshape(4, 3)
    assert_collectives(f, x, expected={}, mesh=mesh)
    np.testing.assert_allclose(jax.jit(f)(x), _norm()(x, use_running_average=True), rtol=1e-6)


def test_in_global_view_it_is_the_plain_batch_norm() -> None:
    x = jnp.arange(24.0).reshape(8, 3) ** 2
    plain, synced = _norm(), convert_sync_batchnorm(_norm(), _mesh(4))
    np.testing.assert_array_equal(plain(x), synced(x))
    np.testing.assert_array_equal(plain.var[...], synced.var[...])


def test_only_the_given_axes_are_summed() -> None:
    """Features that differ over tp (a tensor-parallel layer before it) keep statistics of their own."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    norm = convert_sync_batchnorm(_norm(2, use_scale=False, use_bias=False), mesh["dp"])
    graphdef, state = nnx.split(norm)

    def local(x: jax.Array) -> Any:
        norm = nnx.merge(graphdef, state, copy=True)
        return norm(x), norm.mean[...]

    f = jax.shard_map(local, mesh=mesh.jax_mesh, in_specs=P("dp", "tp"), out_specs=(P("dp", "tp"), P("tp")))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
    whole = _norm(4, use_scale=False, use_bias=False)
    y, mean = jax.jit(f)(x)
    np.testing.assert_allclose(y, whole(x), atol=2e-6)
    np.testing.assert_allclose(mean, whole.mean[...], atol=1e-6)


class _Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.blocks = nnx.List([nnx.BatchNorm(3, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks[0](self.linear(x))


def test_before_or_after_wrapping_concrete_or_abstract() -> None:
    mesh = _mesh(2)

    def convert_last(model: nnx.Module) -> None:
        convert_sync_batchnorm(DistributedDataParallel(model, mesh), mesh)

    def convert_first(model: nnx.Module) -> None:
        DistributedDataParallel(convert_sync_batchnorm(model, mesh), mesh)

    for parallelize in (convert_first, convert_last):
        model = _Net(nnx.Rngs(0))
        parallelize(model)
        sharded = jaxpar.init_sharded(lambda: _Net(nnx.Rngs(0)), parallelize)
        for built in (model, sharded):
            assert (type(built).__name__, type(built.blocks[0]).__name__) == ("DDP_Net", "SyncBatchNorm")
        assert nnx.graphdef(model) == nnx.graphdef(sharded)


class _Centered(nnx.BatchNorm):
    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]
        return super().__call__(x) - 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), r"Linear holds no nnx.BatchNorm"),
        (
            lambda: nnx.Sequential(_norm(axis_name="dp")),
            r"layers.0: nnx.BatchNorm\(axis_name='dp'\).*Remove axis_name",
        ),
        (
            lambda: convert_sync_batchnorm(_norm(), _mesh(2)),
            r"the model itself: synchronised already, over \('dp',\)",
        ),
        (lambda: _Centered(3, rngs=nnx.Rngs(0)), r"_Centered has a __call__ of its own"),
    ],
)
def test_what_cannot_be_converted_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ParallelizeError, match=message):
        convert_sync_batchnorm(make(), _mesh(2))


def test_complex_inputs_are_refused() -> None:
    norm = convert_sync_batchnorm(_norm(), _mesh(2))
    with pytest.raises(ParallelizeError, match=r"complex64.*real numbers"):
        _on_ranks(norm, _mesh(2))(jnp.ones((4, 3), jnp.complex64), None, jnp.ones((4, 3)))
