"""Runs microbatches one after the other in one loop, adding up what they give.

state_0 -> microbatch 0 -> state_1 -> microbatch 1 -> ...          sums = results_0 + results_1 + ...
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import _compat
from jaxpar._module import vary
from jaxpar._pytree import PyTree

Leaves = list[jax.Array]


def scan_sum(
    fn: Callable[[Leaves, PyTree], tuple[PyTree, PyTree, Leaves]], state: Leaves, parts: PyTree
) -> tuple[PyTree, PyTree, Leaves]:
    """Runs `fn(state, part)` over the parts (dim 0), threading `state` through and summing the other results."""
    fn = jax.jit(fn, inline=True)  # so that it is traced once, here, and not again in the loop
    first = jax.tree.map(lambda x: x[0], parts)
    # The state may begin to vary only through its update; with that known, the second look has the final types.
    state = _vary_like(state, jax.eval_shape(fn, state, first)[2])
    shapes = jax.eval_shape(fn, state, first)
    zeros = jax.tree.map(_zeros_like, shapes[:2])

    def body(carry: Any, part: PyTree) -> tuple[Any, None]:
        sums, state = carry
        grads, means, state = fn(state, part)
        return (jax.tree.map(jnp.add, sums, (grads, means)), state), None

    ((grads, means), state), _ = jax.lax.scan(body, (zeros, state), parts)
    return grads, means, state


def widen(x: jax.Array) -> jax.Array:
    """Sums of many small gradients are kept in fp32 at least (row X21)."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _vary_like(values: Leaves, types: Sequence[jax.ShapeDtypeStruct]) -> Leaves:
    return [vary(x, tuple(_compat.varying_axes(t))) for x, t in zip(values, types, strict=True)]


def _zeros_like(type_: jax.ShapeDtypeStruct) -> jax.Array:
    return vary(jnp.zeros(type_.shape, type_.dtype), tuple(_compat.varying_axes(type_)))
