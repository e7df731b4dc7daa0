"""A backward in two halves: first what earlier stages wait for, then the gradients of the weights.

    B   dy -> d4 -> d3 -> d2 -> d1 -> dx        I   the chain to dx
              |     |     |     |               W   what hangs below it: dw_i from d_i, handed over by I
             dw4   dw3   dw2   dw1

Each equation of B belongs to exactly one half, so nothing is computed twice: a chain of four layers has eight matmuls in
B, four in I, four in W. A loop (`jax.lax.scan`) is one equation: where it carries dx, all of it belongs to I.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar import _compat

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class Halves:
    """The halves of a program `args -> (*first, *second)`.

    Args:
        first: `args -> (*first, *carry)`.
        second: `(*args it uses, *carry) -> second`.
        num_first: how many outputs are wanted first.
        second_uses: which args the second half uses.
    """

    first: Callable[..., Leaves]
    second: Callable[..., Leaves]
    num_first: int
    second_uses: tuple[int, ...]
    carry_types: tuple[Any, ...]


def halves(closed: Any, is_first: Sequence[bool]) -> Halves:
    """Cut a traced backward between the outputs that are wanted first and the others.

    Args:
        closed: the closed jaxpr of the backward, without nested calls.
        is_first: for each output whether it is wanted first.
    """
    jaxpr = closed.jaxpr
    early = [v for v, first in zip(jaxpr.outvars, is_first, strict=True) if first]
    late = [v for v, first in zip(jaxpr.outvars, is_first, strict=True) if not first]
    needed = {v for v in early if not _compat.is_literal(v)}
    in_first: set[int] = set()
    for number in reversed(range(len(jaxpr.eqns))):
        equation = jaxpr.eqns[number]
        if needed & set(equation.outvars):
            in_first.add(number)
            needed.update(v for v in equation.invars if not _compat.is_literal(v))
    made_first = {v for n in in_first for v in jaxpr.eqns[n].outvars}
    rest, _ = _compat.without_unused(
        _compat.sub_program(
            jaxpr,
            [*jaxpr.invars, *made_first],
            late,
            [e for n, e in enumerate(jaxpr.eqns) if n not in in_first],
        ),
        [True] * len(late),
    )
    used = {v for e in rest.eqns for v in e.invars if not _compat.is_literal(v)}
    used |= {v for v in late if not _compat.is_literal(v)}
    carry = [v for n in sorted(in_first) for v in jaxpr.eqns[n].outvars if v in used]
    uses = tuple(i for i, v in enumerate(jaxpr.invars) if v in used)
    first = _compat.sub_program(
        jaxpr, jaxpr.invars, [*early, *carry], [jaxpr.eqns[n] for n in sorted(in_first)]
    )
    second = _compat.sub_program(jaxpr, [*(jaxpr.invars[i] for i in uses), *carry], late, rest.eqns)
    return Halves(
        first=_compat.as_function(first, closed.consts),
        second=_compat.as_function(second, closed.consts),
        num_first=len(early),
        second_uses=uses,
        carry_types=tuple(v.aval for v in carry),
    )
