"""Order without communication: a value that XLA must compute after some numbers are known.

    wait_for(x, [n])    x, unchanged; what uses it runs after `n` is there
    copy_after(x, [n])  the same for an array that lives on, such as a parameter
    number_of([y, z])   f32[]: known only when y and z are

Collectives are placed with these: buckets of gradients stay apart, gathers start no earlier than they may.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar import _compat


def wait_for(x: jax.Array, numbers: Sequence[jax.Array]) -> jax.Array:
    """Returns `x`, unchanged and of the same type, in a way that XLA must compute after `numbers` (f32[] each).

    One element is rewritten in place under a condition that never holds (a number is both NaN and not NaN) and
    that the compiler does not fold. `jax.lax.optimization_barrier` is not enough: XLA:CPU removes it before its
    combiners and its elimination of common subexpressions run (jax 0.10.2 and 0.12.0), and on 0.10.2 it joins the
    varying types of its operands. Since the numbers' values do not matter, their types do not either: axes over
    which they vary and `x` does not are forgotten.
    """
    if not x.size or not numbers:
        return x
    element = jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)
    element = jnp.where(_never(x, numbers), jnp.zeros_like(element), element)
    return jax.lax.dynamic_update_slice(x, element, (0,) * x.ndim)


def copy_after(x: jax.Array, numbers: Sequence[jax.Array]) -> jax.Array:
    """As `wait_for`, for an array that lives on (a parameter): its copy is not made before the numbers are known."""
    if not x.size or not numbers:
        return x
    return jnp.where(_never(x, numbers), jnp.zeros_like(x), x)


def _never(x: jax.Array, numbers: Sequence[jax.Array]) -> jax.Array:
    """bool[]: false, in a way that the compiler does not see; known only when the numbers are."""
    mine = _compat.varying_axes(jax.typeof(x))
    never = []
    for number in numbers:
        foreign = _compat.varying_axes(jax.typeof(number)) - mine
        number = _compat.forget_axes(number, tuple(sorted(foreign)))
        never.append(jnp.logical_and(number != number, number == number))
    return functools.reduce(jnp.logical_or, never)


def number_of(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns f32[]: something that is known only when all arrays are; zero if there is none."""
    first = [
        jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(()).astype(jnp.float32)
        for x in arrays
        if x.size
    ]
    return functools.reduce(jnp.add, first, jnp.float32(0))
