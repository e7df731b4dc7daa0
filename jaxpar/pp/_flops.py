"""Work of a traced program, in floating-point operations.

matmul [M, K] @ [K, N]     2 M N K
convolution                2 x outputs x what each is summed over
anything else              1 for each element it makes, so that a module without matmuls weighs something

A `jax.lax.scan` counts as often as it runs, of a `jax.lax.cond` the heaviest branch counts, a `while_loop` counts once.
"""

import math
from collections.abc import Iterator
from typing import Any


def num_flops(jaxpr: Any) -> int:
    """Floating-point operations of a jaxpr and the programs nested in it."""
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    num_made = sum(math.prod(getattr(v.aval, "shape", ())) for v in equation.outvars)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * num_made * math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        return 2 * num_made * math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
    nested = [num_flops(inner) for inner in _nested(params)]
    if not nested:
        return num_made
    if name == "cond":
        return max(nested)
    return sum(nested) * params.get("length", 1)


def _nested(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)  # of a closed jaxpr; an open one has none
            if hasattr(inner, "eqns"):
                yield inner
