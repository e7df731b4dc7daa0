"""A backward pass that stores nothing made of parameters alone.

    jax.vjp(fn)     outputs, pullback;  the pullback's residuals r0 r1 r2 ... are known from the traced forward
    r_i needs only parameters (the parameter itself, its cast, its transpose)  ->  made again from the parameters
    r_i is an input that stays there anyway                                    ->  taken from there
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
        order: where each residual comes from: ("kept", "remade" or "inputs", position there).
        pullback: structure of the pullback whose leaves are the residuals.
    """

    num_full: int
    num_outputs: int
    is_wanted: tuple[bool, ...]
    program: Callable[..., Leaves]
    remake: Callable[..., Leaves]
    order: tuple[tuple[str, int], ...]
    pullback: Any

    def forward(self, full: Leaves, inputs: Leaves) -> tuple[Leaves, Leaves]:
        """Returns the outputs, and the residuals to keep."""
        values = self.program(*full, *inputs)
        return values[: self.num_outputs], values[self.num_outputs :]

    def backward(
        self, full: Leaves, kept: Leaves, cotangents: Leaves, inputs: Sequence[Any] = ()
    ) -> tuple[Leaves, Leaves]:
        """Returns the cotangents of parameters and inputs; None for those not wanted."""
        source = {"kept": kept, "remade": self.remake(*full), "inputs": inputs}
        residuals = [source[where][i] for where, i in self.order]
        pullback = jax.tree.unflatten(self.pullback, residuals)
        wanted = iter(pullback(cotangents))
        out = [next(wanted) if want else None for want in self.is_wanted]
        return out[: self.num_full], out[self.num_full :]


def split_backward(
    fn: Callable[[Leaves, Leaves], Leaves],
    full: Leaves,
    inputs: Leaves,
    is_wanted: Sequence[bool],
    *,
    num_aux: int = 0,
    stays: Sequence[bool] = (),
) -> SplitBackward:
    """Traces `fn(full, inputs)` and its backward, once; nothing runs.

    Args:
        fn: flat lists of arrays in and out.
        full: parameters.
        inputs: everything else.
        is_wanted: for each leaf of both, whether its cotangent is asked for.
        num_aux: how many outputs, the last ones, have no cotangent.
        stays: for each input whether the backward is given it again, so that it need not be kept.
    """
    pullback_of: list[Any] = []

    def linearized(*values: jax.Array) -> Leaves:
        def of_wanted(*wanted: jax.Array) -> tuple[Leaves, Leaves]:
            left = iter(wanted)
            merged = [next(left) if want else x for x, want in zip(values, is_wanted, strict=True)]
            outputs = fn(merged[: len(full)], merged[len(full) :])
            return outputs[: len(outputs) - num_aux], outputs[len(outputs) - num_aux :]

        wanted = [x for x, want in zip(values, is_wanted, strict=True) if want]
        outputs, pullback, aux = jax.vjp(of_wanted, *wanted, has_aux=True)
        residuals, structure = jax.tree.flatten(pullback)
        pullback_of.append((len(outputs) + len(aux), structure))
        return [*outputs, *aux, *residuals]

    closed = jax.make_jaxpr(linearized)(*full, *inputs)
    num_outputs, pullback = pullback_of[-1]
    return _cut(closed, len(full), num_outputs, tuple(is_wanted), pullback, stays or [False] * len(inputs))


def _cut(
    closed: Any,
    num_full: int,
    num_outputs: int,
    is_wanted: tuple[bool, ...],
    pullback: Any,
    stays: Sequence[bool],
) -> SplitBackward:
    jaxpr = closed.jaxpr
    staying = {variable: i for i, variable in enumerate(jaxpr.invars[num_full:]) if stays[i]}
    order: list[tuple[str, int]] = []
    is_kept, is_remade = [i < num_outputs for i in range(len(jaxpr.outvars))], [False] * len(jaxpr.outvars)
    for index in range(num_outputs, len(jaxpr.outvars)):
        variable = jaxpr.outvars[index]
        if not _compat.is_literal(variable) and variable in staying:
            order.append(("inputs", staying[variable]))
        elif _needs_only(jaxpr, index, num_full):
            order.append(("remade", sum(is_remade)))
            is_remade[index] = True
        else:
            order.append(("kept", sum(is_kept) - num_outputs))
            is_kept[index] = True
    return SplitBackward(
        num_full=num_full,
        num_outputs=num_outputs,
        is_wanted=is_wanted,
        program=_part(closed, is_kept),
        remake=_part(closed, is_remade),
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
