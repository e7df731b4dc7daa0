"""The order in which gradients become ready is the reverse of the parameters' first use in the forward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpar.ddp._order import ready_order

X = jnp.ones((2, 4))
W = jnp.ones((4, 4))
Params = dict[str, jax.Array]


def _order(fn: Callable[[Params], jax.Array], *names: str) -> str:
    """The names in the order in which they become ready. Names are sorted in a dict: a, b, c, ... are leaves 0, 1, 2."""
    params = {name: jnp.ones((3, 4, 4)) if name == "s" else W for name in names}
    return "".join(sorted(params)[leaf] for leaf in ready_order(fn, params))


def _mlp(p: Params) -> jax.Array:
    return jnp.sum(jnp.tanh(jnp.tanh(X @ p["b"]) @ p["c"]) @ p["a"])


def _shared(p: Params) -> jax.Array:
    return jnp.sum(jnp.tanh(jnp.tanh(X @ p["a"]) @ p["b"]) @ p["a"].T)  # a: embedding and head


def _scan(p: Params) -> jax.Array:
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), X @ p["a"], p["s"])
    return jnp.sum(h @ p["b"])


def _nested(wrap: Callable[[Any], Any]) -> Callable[[Params], jax.Array]:
    def fn(p: Params) -> jax.Array:
        block = wrap(lambda h, first, second: jnp.tanh(h @ first) @ second)
        return jnp.sum(block(X, p["c"], p["a"]) @ p["b"])

    return fn


def _cast(p: Params) -> jax.Array:
    low = {name: w.astype(jnp.bfloat16) for name, w in p.items()}  # all casts first: none of them is a use
    return jnp.sum(X @ low["a"] @ low["c"] @ low["b"])


def _cast_in_jit(p: Params) -> jax.Array:
    low = jax.jit(lambda p: jax.tree.map(lambda w: w.astype(jnp.bfloat16), p))(p)
    return jnp.sum(X @ low["a"] @ low["c"] @ low["b"])


def _cond(p: Params) -> jax.Array:
    h = lax.cond(X[0, 0] > 0, lambda h: h @ p["c"], lambda h: h @ p["b"], X)
    return jnp.sum(h @ p["a"])


@pytest.mark.parametrize(
    ("fn", "order"),
    [
        pytest.param(_mlp, "acb", id="mlp"),
        pytest.param(_shared, "ba", id="shared weight: its first use is its last gradient"),
        pytest.param(_scan, "bsa", id="scan"),
        pytest.param(_nested(jax.jit), "bac", id="jit"),
        pytest.param(_nested(jax.checkpoint), "bac", id="remat"),
        pytest.param(_nested(lambda f: jax.jit(jax.checkpoint(f))), "bac", id="remat in jit"),
        pytest.param(_cast, "bca", id="casts"),
        pytest.param(_cast_in_jit, "bca", id="casts in jit"),
        pytest.param(lambda p: jnp.sum(X @ p["b"] @ p["c"]), "acb", id="unused first"),
    ],
)
def test_ready_order(fn: Callable[[Params], jax.Array], order: str) -> None:
    assert _order(fn, *order) == order


def test_parameters_of_both_branches_of_a_conditional_are_one_use() -> None:
    assert _order(_cond, "a", "b", "c")[0] == "a"


def test_the_order_is_that_of_the_compiled_backward() -> None:
    """Seen from the other side: the backward's matmuls that make the weight gradients come in this order."""
    jaxpr = jax.make_jaxpr(jax.grad(_mlp))({"a": W, "b": W, "c": W}).jaxpr
    made = {id(var): at for at, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    ready = sorted(range(3), key=lambda leaf: made[id(jaxpr.outvars[leaf])])
    assert tuple(ready) == ready_order(_mlp, {"a": W, "b": W, "c": W})
