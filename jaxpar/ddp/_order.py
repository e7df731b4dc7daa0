"""In which order gradients become ready, read from the traced forward pass.

forward   embed -> block0 -> block1 -> head         first use of each parameter
backward  head <- block1 <- block0 <- embed         a gradient is complete when the backward has passed its
                                                    parameter's first use: the reverse order
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxpar._pytree import PyTree


def ready_order(fn: Callable[..., Any], params: PyTree, *args: Any) -> tuple[int, ...]:
    """Returns the leaves of `params` in the order in which their gradients become ready in `fn`'s backward.

    `fn(params, *args)` is traced once, nothing runs. Unused leaves come first (their gradients are zeros).
    PyTorch learns the same order by watching the first iteration (row P3).
    """
    num_leaves = len(jax.tree.leaves(params))
    jaxpr = jax.make_jaxpr(fn)(params, *args).jaxpr
    first_use: dict[int, int] = {}
    _walk(jaxpr, {id(var): leaf for leaf, var in enumerate(jaxpr.invars[:num_leaves])}, first_use, [0])
    return tuple(sorted(range(num_leaves), key=lambda leaf: -first_use.get(leaf, 1 << 62)))


def _walk(jaxpr: Any, leaf_of: dict[int, int], first_use: dict[int, int], clock: list[int]) -> None:
    """Notes for each leaf the time of its first use, inside nested programs too; aliases are followed."""
    for eqn in jaxpr.eqns:
        used = {position: leaf_of[id(var)] for position, var in enumerate(eqn.invars) if id(var) in leaf_of}
        if not used:
            clock[0] += 1
        elif eqn.primitive.name in _ALIASES:
            leaf_of[id(eqn.outvars[0])] = used[0]
        elif not _enter(eqn, used, leaf_of, first_use, clock):
            for leaf in used.values():
                first_use.setdefault(leaf, clock[0])
            clock[0] += 1


# A cast or a change of varying type is not yet a use: its backward follows that of the value's real use.
_ALIASES = frozenset({"convert_element_type", "pvary", "pcast", "copy", "reshape"})


def _enter(
    eqn: Any, used: dict[int, int], leaf_of: dict[int, int], first_use: dict[int, int], clock: list[int]
) -> bool:
    """Walks the nested program of a call-like equation; False if there is none whose inputs are the equation's.

    A loop counts as one use at its place: its gradients are complete only after its whole backward.
    """
    if eqn.primitive.name in ("scan", "while", "cond"):
        return False
    for value in eqn.params.values():
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns") and len(inner.invars) == len(eqn.invars):
            inside = {id(inner.invars[position]): leaf for position, leaf in used.items()}
            _walk(inner, inside, first_use, clock)
            for var, inner_var in zip(eqn.outvars, inner.outvars, strict=True):
                if id(inner_var) in inside:  # the nested program only casts the leaf, or hands it on
                    leaf_of[id(var)] = inside[id(inner_var)]
            return True
    return False
