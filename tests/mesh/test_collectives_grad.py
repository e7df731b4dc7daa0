"""Duals: every collective is transposed right over all devices, and communicates as documented on the way back."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.debug import assert_collectives
from jaxpar.mesh import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    init_device_mesh,
    permute,
    reduce,
    reduce_scatter,
    ring_shift,
    scatter,
)

MESH = init_device_mesh((2, 1, 4), ("dp", "one", "tp")).jax_mesh
Axis = str | tuple[str, ...]
Body = Callable[[jax.Array, Axis], jax.Array]

# name -> (function, result is invariant, collectives of the backward pass alone)
_LINEAR: dict[str, tuple[Body, bool, dict[str, int]]] = {
    "sum": (lambda x, a: all_reduce(x, a), True, {}),
    "mean": (lambda x, a: all_reduce(x, a, "mean"), True, {}),
    "broadcast": (lambda x, a: broadcast(x, a), True, {}),
    "all_gather_invariant": (lambda x, a: all_gather(x, a, invariant=True), True, {}),
    "all_gather": (lambda x, a: all_gather(x, a), False, {"reduce_scatter": 1}),
    "stack": (lambda x, a: all_gather(x, a, dim=1, tiled=False), False, {"reduce_scatter": 1}),
    "reduce_scatter": (lambda x, a: reduce_scatter(x, a, dim=1), False, {"all_gather": 1}),
    "reduce_scatter_mean": (lambda x, a: reduce_scatter(x, a, op="mean"), False, {"all_gather": 1}),
    "all_to_all": (lambda x, a: all_to_all(x, a, split_dim=0, concat_dim=1), False, {"all_to_all": 1}),
    "reduce": (lambda x, a: reduce(x, a), False, {"all_reduce": 1}),
    "gather": (lambda x, a: gather(x, a), False, {"reduce_scatter": 1}),
    "scatter": (lambda x, a: scatter(x, a), False, {"all_gather": 1}),
    "ring_shift": (lambda x, a: ring_shift(x, a), False, {"collective_permute": 1}),
    "permute": (
        lambda x, a: permute(x, a, [] if a == "one" else [(0, 7)]),
        False,
        {"collective_permute": 1},
    ),
}
_NONLINEAR: dict[str, Body] = {
    "max": lambda x, a: all_reduce(x, a, "max"),
    "min": lambda x, a: all_reduce(x, a, "min"),
    "prod": lambda x, a: all_reduce(x, a, "prod"),
    "reduce_prod": lambda x, a: all_reduce(reduce(x, a, op="prod"), a),
}


def _global(body: Body, axis: Axis, *, invariant: bool) -> Callable[[jax.Array], jax.Array]:
    """The collective as a function of all devices' blocks, a global array."""
    return jax.shard_map(
        lambda x: body(x, axis), mesh=MESH, in_specs=P(axis), out_specs=P() if invariant else P(axis)
    )


def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("axis", ["one", ("dp", "tp")])
def test_dot_products_agree_and_differences_are_exact(axis: Axis) -> None:
    """<w, J v> = <J^T w, v> for random v, w over all devices; f(x + v) - f(x) = J v, as f is linear."""
    functions = {name: _global(body, axis, invariant=inv) for name, (body, inv, _) in _LINEAR.items()}
    x, v = _normal(0, (64, 8)), _normal(1, (64, 8))
    ws = {name: _normal(2, jax.eval_shape(f, x).shape) for name, f in functions.items()}

    @jax.jit
    def derivatives(x: jax.Array, v: jax.Array, ws: dict[str, jax.Array]) -> dict[str, tuple[jax.Array, ...]]:
        both = {
            name: (*jax.jvp(f, (x,), (v,)), jax.vjp(f, x)[1](ws[name])[0]) for name, f in functions.items()
        }
        return {name: (*both[name], f(x + v)) for name, f in functions.items()}

    for name, (y, jv, jtw, moved) in derivatives(x, v, ws).items():
        # sums of 512 to 4096 products of size 1, rounded to 1e-7 each
        np.testing.assert_allclose(
            jnp.vdot(ws[name], jv), jnp.vdot(jtw, v), rtol=1e-5, atol=1e-3, err_msg=name
        )
        np.testing.assert_allclose(moved - y, jv, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("axis", ["one", "tp"])
def test_nonlinear_ops_agree_with_one_device_and_finite_differences(axis: str) -> None:
    n = MESH.shape[axis]
    functions = {name: _global(body, axis, invariant=True) for name, body in _NONLINEAR.items()}

    @jax.jit
    def derivatives(
        x: jax.Array, v: jax.Array, w: jax.Array
    ) -> dict[str, tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
        step = 1e-6
        slope = {name: (f(x + step * v) - f(x - step * v)) / (2 * step) for name, f in functions.items()}
        return {
            name: (*jax.jvp(f, (x,), (v,)), jax.vjp(f, x)[1](w)[0], slope[name])
            for name, f in functions.items()
        }

    with jax.enable_x64(True):
        x, v = (np.random.default_rng(seed).normal(size=(16, 2)) for seed in (0, 1))
        w = np.random.default_rng(2).normal(size=(16 // n, 2))
        for name, (y, jv, jtw, slope) in derivatives(x, v, w).items():
            one_device = getattr(jnp, name.removeprefix("reduce_"))
            want, pull = jax.vjp(lambda x, op=one_device: op(x.reshape(n, -1, 2), axis=0), x)
            np.testing.assert_allclose(y, want, rtol=1e-12, err_msg=name)
            np.testing.assert_allclose(jtw, pull(w)[0], rtol=1e-12, err_msg=name)
            np.testing.assert_allclose(np.vdot(w, jv), np.vdot(jtw, v), rtol=1e-12, err_msg=name)
            np.testing.assert_allclose(slope, jv, rtol=1e-6, atol=1e-8, err_msg=name)


def test_ties_share_the_gradient_of_max_equally() -> None:
    f = jax.shard_map(lambda x: all_reduce(x, "tp", "max"), mesh=MESH, in_specs=P("tp"), out_specs=P())
    gradient = jax.grad(lambda x: f(x).sum())(jnp.asarray([3.0, 1.0, 3.0, 0.0]))
    np.testing.assert_array_equal(gradient, [0.5, 0, 0.5, 0])


def test_prod_is_differentiated_right_at_zero() -> None:
    f = jax.shard_map(lambda x: all_reduce(x, "tp", "prod"), mesh=MESH, in_specs=P("tp"), out_specs=P())
    gradient = jax.jit(jax.grad(lambda x: f(x).sum()))(jnp.asarray([2.0, 0.0, 3.0, 5.0]))
    np.testing.assert_array_equal(gradient, [0, 30, 0, 0])


@pytest.mark.parametrize("name", _LINEAR)
def test_backward_communicates_as_documented(name: str) -> None:
    body, invariant, backward = _LINEAR[name]
    f = _global(body, ("dp", "tp"), invariant=invariant)
    shape = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    pull = lambda w: jax.linear_transpose(f, shape)(w)[0]  # noqa: E731
    assert_collectives(
        pull,
        jax.eval_shape(f, shape),
        expected={(kind, ("dp", "tp")): count for kind, count in backward.items()},
        mesh=MESH,
    )


@pytest.mark.parametrize(("op", "expected"), [("max", {"all_reduce": 2}), ("prod", {"all_gather": 1})])
def test_gradient_of_max_counts_ties_and_of_prod_is_local(op: str, expected: dict[str, int]) -> None:
    f = jax.shard_map(lambda x: all_reduce(x, "tp", op), mesh=MESH, in_specs=P("tp"), out_specs=P())
    assert_collectives(jax.grad(lambda x: f(x).sum()), jnp.ones((4, 3)), expected=expected)


def test_an_invariant_loss_counts_once_and_a_varying_loss_is_summed() -> None:
    """The difference to PyTorch, in numbers: w = 3, one sample per device, loss_i = w * x_i, x = 1, 2, 3, 4."""

    def once(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: all_reduce((w * x).sum(), "tp", "mean"))(w)

    def summed(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: (w * x).sum())(w)

    x = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    for step, want in ((once, 2.5), (summed, 10.0)):
        f = jax.shard_map(step, mesh=MESH, in_specs=(P(), P("tp")), out_specs=P())
        assert f(jnp.float32(3), x) == want


def test_integers_can_be_reduced_under_grad() -> None:
    def loss(w: jax.Array, n: jax.Array) -> jax.Array:
        return (all_reduce(w, "tp") * all_reduce(n, "tp", "max")).sum()

    f = jax.shard_map(loss, mesh=MESH, in_specs=P("tp"), out_specs=P())
    np.testing.assert_array_equal(jax.grad(f)(jnp.ones(4), jnp.arange(4)), [3, 3, 3, 3])
