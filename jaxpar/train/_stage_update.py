"""The optimizer's update, cut into one program for each stage: any optax transform that treats parameters apart.

    whole      grads, params, state of all stages -> params, state         traced once, abstract
    stage s    what its own parameters need of it                          by data flow; shared numbers (a step count) everywhere

A transform in which one parameter's update depends on another stage's gradients (a norm over all of them) cannot be cut, and
is an error; clipping by one norm is `TrainStep(clip_norm=...)`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar import _compat
from jaxpar._errors import ParallelizeError
from jaxpar.pp._inline import trace

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class StageUpdate:
    """Args:
    program: `(*inputs) -> outputs`, flat.
    inputs: which inputs of the whole update it needs.
    outputs: which outputs of the whole update it makes.
    """

    program: Callable[..., Leaves]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def cut_update(
    update: Callable[..., Leaves],
    arguments: Sequence[Any],
    owner: Sequence[int | None],
    names: Sequence[str],
    n_stages: int,
) -> tuple[list[StageUpdate], list[int | None]]:
    """Cut a flat `update(*arguments)` by the stages that own its arguments.

    Args:
        update: flat lists of arrays in and out.
        arguments: shapes and dtypes.
        owner: for each argument the stage whose it is; None if that is to be found (state) or if all have it.
        names: of the outputs, for messages.
        n_stages: how many stages.

    Returns:
        A program for each stage, and the owner of each output: None for numbers that every stage makes for itself.

    Raises:
        ParallelizeError: an output depends on arguments of two stages.
    """
    closed = trace(update, *arguments)
    jaxpr = closed.jaxpr
    stages: dict[Any, frozenset[int]] = {
        variable: frozenset() if stage is None else frozenset({stage})
        for variable, stage in zip(jaxpr.invars, owner, strict=True)
    }

    def of(atoms: Sequence[Any]) -> frozenset[int]:
        return frozenset().union(*(stages.get(a, frozenset()) for a in atoms if not _compat.is_literal(a)))

    for equation in jaxpr.eqns:
        found = of(equation.invars)
        stages.update((variable, found) for variable in equation.outvars)
    owners: list[int | None] = []
    for atom, name in zip(jaxpr.outvars, names, strict=True):
        found = sorted(of([atom]))
        if len(found) > 1:
            raise ParallelizeError(
                f"TrainStep: the optimizer's update of {name} depends on parameters or gradients of stages {found}, which lie on "
                f"other devices: a transform looks at all gradients at once. For clipping by a global norm write "
                f"TrainStep(..., clip_norm=...) in place of optax.clip_by_global_norm."
            )
        owners.append(found[0] if found else None)
    return [_part(closed, owners, stage) for stage in range(n_stages)], owners


def _part(closed: Any, owners: Sequence[int | None], stage: int) -> StageUpdate:
    outputs = tuple(i for i, owner in enumerate(owners) if owner in (stage, None))
    part, used = _compat.without_unused(closed.jaxpr, [owner in (stage, None) for owner in owners])
    return StageUpdate(
        program=_compat.as_function(part, closed.consts),
        inputs=tuple(i for i, use in enumerate(used) if use),
        outputs=outputs,
    )


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype alone."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
