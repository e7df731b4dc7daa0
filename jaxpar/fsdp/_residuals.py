"""A backward pass that stores nothing made of parameters alone.

    jax.vjp(fn)     outputs, pullback;  the pullback's residuals r0 r1 r2 ... are known from the traced forward
    r_i needs only parameters (the parameter itself, its cast, its transpose)  ->  made again from the parameters
    r_i needs an input                                                         ->  kept

What needs what is read from the jaxpr, inside nested programs too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxpar import _compat
from jaxpar._module import vary

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """The forward of a function and its backward, cut between what is kept and what is made again.

    Args:
        num_full: number of parameter leaves, the function's first arguments.
        num_outputs: number of its outputs.
        is_wanted: for each argument, whether its cotangent is asked for.
        program: (*full, *inputs) -> (*outputs, *kept).
        remake: full -> the residuals made of parameters alone.
        order: where each residual comes from: (is_kept, position there).
        pullback: structure of the pullback whose leaves are the residuals.
    """

    num_full: int
    num_outputs: int
    is_wanted: tuple[bool, ...]
    program: Callable[..., Leaves]
    remake: Callable[..., Leaves]
    order: tuple[tuple[bool, int], ...]
    pullback: Any

    def forward(self, full: Leaves, inputs: Leaves) -> tuple[Leaves, Leaves]:
        """Returns the outputs, and the residuals to keep."""
        values = self.program(*full, *inputs)
        return values[: self.num_outputs], values[self.num_outputs :]

    def backward(self, full: Leaves, kept: Leaves, cotangents: Leaves) -> tuple[Leaves, Leaves]:
        """Returns the cotangents of parameters and inputs; None for those not wanted."""
        remade = self.remake(*full)
        residuals = [kept[i] if is_kept else remade[i] for is_kept, i in self.order]
        pullback = jax.tree.unflatten(self.pullback, residuals)
        wanted = iter(pullback(cotangents))
        out = [next(wanted) if want else None for want in self.is_wanted]
        return out[: self.num_full], out[self.num_full :]


def split_backward(
    fn: Callable[[Leaves, Leaves], Leaves], full: Leaves, inputs: Leaves, is_wanted: Sequence[bool]
) -> SplitBackward:
    """Traces `fn(full, inputs)` and its backward, once; nothing runs.

    Args:
        fn: flat lists of arrays in and out.
        full: parameters.
        inputs: everything else.
        is_wanted: for each leaf of both, whether its cotangent is asked for.
    """
    pullback_of: list[Any] = []

    def linearized(*values: jax.Array) -> Leaves:
        def of_wanted(*wanted: jax.Array) -> Leaves:
            left = iter(wanted)
            merged = [next(left) if want else x for x, want in zip(values, is_wanted, strict=True)]
            return fn(merged[: len(full)], merged[len(full) :])

        wanted = [x for x, want in zip(values, is_wanted, strict=True) if want]
        outputs, pullback = jax.vjp(of_wanted, *wanted)
        residuals, structure = jax.tree.flatten(pullback)
        pullback_of.append((len(outputs), structure))
        return [*outputs, *residuals]

    closed = jax.make_jaxpr(linearized)(*full, *inputs)
    num_outputs, pullback = pullback_of[-1]
    return _cut(closed, len(full), num_outputs, tuple(is_wanted), pullback)


def _cut(
    closed: Any, num_full: int, num_outputs: int, is_wanted: tuple[bool, ...], pullback: Any
) -> SplitBackward:
    jaxpr = closed.jaxpr
    made_of_parameters = [
        index >= num_outputs and _needs_only(jaxpr, index, num_full) for index in range(len(jaxpr.outvars))
    ]
    order, counts = [], [0, 0]
    for index in range(num_outputs, len(jaxpr.outvars)):
        is_kept = not made_of_parameters[index]
        order.append((is_kept, counts[is_kept]))
        counts[is_kept] += 1
    return SplitBackward(
        num_full=num_full,
        num_outputs=num_outputs,
        is_wanted=is_wanted,
        program=_part(closed, [not only for only in made_of_parameters]),
        remake=_part(closed, made_of_parameters),
        order=tuple(order),
        pullback=pullback,
    )


def _needs_only(jaxpr: Any, output: int, num_full: int) -> bool:
    """Whether an output depends on the first `num_full` inputs, on at least one of them, and on no other."""
    _, used = _compat.without_unused(jaxpr, [i == output for i in range(len(jaxpr.outvars))])
    return any(used[:num_full]) and not any(used[num_full:])


def _part(closed: Any, is_output_used: list[bool]) -> Callable[..., Leaves]:
    """The program of some of the outputs; it takes the first arguments that it needs, or all."""
    part, used = _compat.without_unused(closed.jaxpr, is_output_used)
    run = _compat.as_function(part, closed.consts)
    return lambda *values: run(*(x for x, use in zip(values, used, strict=False) if use))


def is_floating(x: Any) -> bool:
    """Whether a value has a gradient."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def instantiate(cotangent: Any) -> Any:
    """A cotangent as an array: JAX's symbolic zeros become zeros of their type."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, jax.dtypes.float0)
    return vary(jnp.zeros(aval.shape, aval.dtype), tuple(_compat.varying_axes(aval)))


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Static:
    """Something that is no array, on its way from a forward rule to its backward rule."""

    value: Any
