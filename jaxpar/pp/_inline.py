"""A traced program without nested calls: what `jax.jit` wrapped inside it is written out.

    m = jit[silu](k)      ->      g = logistic(k);  m = k * g

Cutting a program into stages, or a backward into its two halves, needs every equation at the top level.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpar import _compat

_CALLS = ("jit", "pjit", "closed_call", "core_call")
_REMAT = ("checkpoint", "remat2", "remat")


def trace(fn: Callable[..., Any], *args: Any, through_remat: bool = False) -> Any:
    """The closed jaxpr of `fn(*args)`, flat lists of arrays in and out, with nested calls written out.

    Args:
        fn: what to trace.
        args: arrays, tracers, or abstract values.
        through_remat: Also write out `jax.checkpoint`; in a backward that is a program of its own, nothing is lost.
    """
    closed = jax.make_jaxpr(fn)(*args)
    names = _CALLS + (_REMAT if through_remat else ())
    while any(equation.primitive.name in names for equation in closed.jaxpr.eqns):
        closed = jax.make_jaxpr(lambda *xs, closed=closed: _inlined(closed.jaxpr, closed.consts, xs, names))(
            *args
        )
    return closed


def _inlined(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], names: tuple[str, ...]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype) if _compat.is_literal(atom) else values[atom]

    for equation in jaxpr.eqns:
        if equation.primitive.name in names:
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            inner_jaxpr, inner_consts = (
                (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            )
            outputs = _inlined(inner_jaxpr, inner_consts, [read(atom) for atom in equation.invars], names)
        else:
            outputs = _run_one(jaxpr, equation, read)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run_one(jaxpr: Any, equation: Any, read: Callable[[Any], Any]) -> list[Any]:
    inputs = list(dict.fromkeys(atom for atom in equation.invars if not _compat.is_literal(atom)))
    program = _compat.sub_program(jaxpr, inputs, equation.outvars, [equation]).replace(constvars=[])
    return _compat.as_function(program, ())(*map(read, inputs))
