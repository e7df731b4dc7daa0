"""Which stages run the same programs: in the tick loop they share one, so that it does not grow with their number.

    stages 0   1   2   3   ...  15          embedding + block, block, block, ..., block + head
    alike  0   1   1   1   ...  15          three forwards and three backwards instead of sixteen of each

Traced programs are compared equation by equation: the same operations on the same values with the same constants. Derivatives
of an operation do not count: these programs are derived already.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax.core
import numpy as np

from jaxpar import _compat
from jaxpar.pp._stage import Stage

_DERIVED = ("custom_jvp_call", "custom_vjp_call")


def alike(stages: Sequence[Stage], outside: Callable[[int], Hashable]) -> tuple[int, ...]:
    """For each stage the first one that runs the same programs.

    Args:
        stages: of the trace over the whole mesh.
        outside: for each stage what must be equal beside its code: where its arrays lie, where its messages go.
    """
    first: dict[Hashable, list[int]] = {}
    found = []
    for s, stage in enumerate(stages):
        candidates = first.setdefault((outside(s), _numbering(stage)), [])
        same = next((c for c in candidates if _same_code(stages[c], stage)), s)
        if same == s:
            candidates.append(s)
        found.append(same)
    return tuple(found)


def same_program(a: Any, b: Any) -> bool:
    """Whether two closed jaxprs compute the same.

    Args:
        a: a closed jaxpr.
        b: another one.
    """
    return len(a.consts) == len(b.consts) and _same(a.consts, b.consts) and _same_jaxpr(a.jaxpr, b.jaxpr)


def _same_code(a: Stage, b: Stage) -> bool:
    return all(map(same_program, a.code.programs, b.code.programs))


def _numbering(stage: Stage) -> Hashable:
    """What of the whole program's numbering reaches a stage's programs."""
    code, kinds = stage.code, stage.kinds
    return (
        tuple(kinds.param_marks[i] for i in code.params),
        tuple((kinds.rest_marks[i], i in stage.changed) for i in stage.rest),
        tuple(kinds.rest_marks[i] for i in stage.changed),
        tuple(i == code.number for i in stage.batch),
        tuple(i < kinds.num_sums for i in code.results),
        (len(code.sent), len(code.kept), code.halves.second_uses, code.halves.num_first),
    )


def _same_jaxpr(a: Any, b: Any) -> bool:
    if len(a.eqns) != len(b.eqns):
        return False
    names: dict[Any, Any] = {}

    def bind(xs: Sequence[Any], ys: Sequence[Any]) -> bool:
        names.update(zip(xs, ys, strict=False))
        return len(xs) == len(ys) and all(x.aval == y.aval for x, y in zip(xs, ys, strict=True))

    def read(x: Any, y: Any) -> bool:
        if _compat.is_literal(x) or _compat.is_literal(y):
            both = _compat.is_literal(x) and _compat.is_literal(y)
            return both and x.aval == y.aval and _same(x.val, y.val)
        return names[x] is y

    def equal(x: Any, y: Any) -> bool:
        return (
            x.primitive is y.primitive
            and len(x.invars) == len(y.invars)
            and all(map(read, x.invars, y.invars))
            and _same(_counting(x), _counting(y))
            and bind(x.outvars, y.outvars)
        )

    return (
        bind(a.constvars, b.constvars)
        and bind(a.invars, b.invars)
        and all(map(equal, a.eqns, b.eqns))
        and len(a.outvars) == len(b.outvars)
        and all(map(read, a.outvars, b.outvars))
    )


def _counting(equation: Any) -> dict[str, Any]:
    """The parameters of an equation that say what it computes."""
    if equation.primitive.name in _DERIVED:
        return {name: x for name, x in equation.params.items() if not callable(x)}
    return equation.params


def _same(x: Any, y: Any) -> bool:
    """Constants and parameters of equations; what cannot be compared is not the same."""
    if type(x) is not type(y):
        return False
    if hasattr(x, "jaxpr"):
        return same_program(x, y)
    if hasattr(x, "eqns"):
        return _same_jaxpr(x, y)
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_same(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(_same, x, y))
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return x is y or _same_array(x, y)
    return x is y or bool(x == y)


def _same_array(x: Any, y: Any) -> bool:
    if (
        (x.shape, x.dtype) != (y.shape, y.dtype)
        or isinstance(x, jax.core.Tracer)
        or isinstance(y, jax.core.Tracer)
    ):
        return False
    return bool(np.array_equal(x, y, equal_nan=np.issubdtype(x.dtype, np.inexact)))
