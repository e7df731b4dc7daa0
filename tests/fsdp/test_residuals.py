"""The backward keeps nothing made of parameters alone, computes nothing twice that needs an input, and is exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar._residuals import split_backward
from jaxpar.fsdp._regather import regathering

W = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
B = jnp.arange(4.0)
X = jnp.asarray(np.random.default_rng(1).normal(size=(3, 6)), jnp.float32)
N = jnp.arange(3)


def layer(full: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
    """Uses the weight as it is, cast, transposed, and inside `jit`; passes integers through."""
    w, b = full
    x, n = inputs
    y = jnp.tanh(x @ w.astype(jnp.bfloat16).astype(jnp.float32) + b)
    z = jax.jit(lambda y, w: jnp.sin(y) @ w.T)(y, w * 2)
    return [z, n + 1]


def test_nothing_made_of_parameters_is_kept() -> None:
    split = split_backward(layer, [W, B], [X, N], [True, True, True, False])
    outputs, kept = split.forward([W, B], [X, N])
    np.testing.assert_array_equal(outputs[1], N + 1)
    shapes = {x.shape for x in kept}
    assert W.shape not in shapes and W.T.shape not in shapes
    assert sum(x.size for x in kept) <= 3 * X.size + 4 * 3 * 4


@pytest.mark.parametrize(
    "wanted", [(True, True, True), (True, False, True), (False, False, True), (True, True, False)]
)
def test_cotangents_are_those_of_jax(wanted: tuple[bool, bool, bool]) -> None:
    split = split_backward(layer, [W, B], [X, N], [*wanted, False])
    outputs, kept = split.forward([W, B], [X, N])
    seed = [jnp.cos(outputs[0]), np.zeros(N.shape, jax.dtypes.float0)]
    full, inputs = split.backward([W, B], kept, seed)
    expected = jax.vjp(lambda w, b, x: layer([w, b], [x, N])[0], W, B, X)[1](seed[0])
    for got, want, is_wanted in zip([*full, inputs[0]], expected, wanted, strict=True):
        if is_wanted:
            np.testing.assert_allclose(got, want, rtol=1e-6)
        else:
            assert got is None
    assert inputs[1] is None


def test_the_backward_reads_the_regathered_parameters() -> None:
    """If the second gather gave another weight, the gradient would be that weight's: nothing else is remembered."""

    def loss(x: jax.Array, scale: float) -> jax.Array:
        again = lambda shards, after: [scale * s for s in shards]  # noqa: E731
        (y,), _ = regathering(
            lambda full, inputs: [inputs[0] @ full[0]], again, [W], [W], [x], jnp.float32(0)
        )
        return y.sum()

    np.testing.assert_allclose(jax.grad(loss)(X, 1.0), jnp.ones((3, 4)) @ W.T, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(X, 2.0), 2 * jnp.ones((3, 4)) @ W.T, rtol=1e-6)


def test_second_derivatives_exist() -> None:
    def loss(x: jax.Array) -> jax.Array:
        again = lambda shards, after: list(shards)  # noqa: E731
        (y,), _ = regathering(
            lambda full, inputs: [jnp.tanh(inputs[0] @ full[0])], again, [W], [W], [x], jnp.float32(0)
        )
        return (y**2).sum()

    got = jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(X)
    expected = jax.grad(lambda x: (jax.grad(lambda x: (jnp.tanh(x @ W) ** 2).sum())(x) ** 2).sum())(X)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
