"""Runs a Flax module as a pure function of its gathered parameters, so that its backward can gather them again.

module, args  --nnx.split-->  structure, own parameters, other arrays  --regathering-->  outputs, changed state
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpar._record import own_shape
from jaxpar.fsdp._order import new_order
from jaxpar.fsdp._regather import regathering

Leaves = list[jax.Array]


@dataclass(frozen=True)
class Result:
    """What a call gave, apart from its arrays.

    Args:
        treedef: structure of the outputs.
        leaves: the output's leaves; None where an array goes.
        changed: variables that the call changed or made, by path; their values are arrays of the trace.
    """

    treedef: Any
    leaves: tuple[Any, ...]
    changed: tuple[tuple[Any, nnx.Variable[Any]], ...]


def run_regathering(
    original: Any,
    module: nnx.Module,
    variables: Sequence[nnx.Variable[Any]],
    full: Leaves,
    shards: Leaves,
    gather: Callable[[Leaves, Sequence[jax.Array]], Leaves],
    token: jax.Array | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, jax.Array]:
    """Returns `original(*args, **kwargs)` and the call's token; see `regathering`.

    Changes of the module's state (a dropout's count, batch statistics) are carried over to `module`.

    Args:
        original: a bound method of the module's own class.
        module: the unit.
        variables: its parameters.
        full: their gathered values, in stored shape.
        shards: what `gather` makes them from again.
        gather: see `regathering`.
        token: see `regathering`.
        args: arguments of the call.
        kwargs: keyword arguments of the call.
    """
    call = (module, args, kwargs)
    place = {id(v): i for i, v in enumerate(variables)}
    graphdef, own, rest = nnx.split(call, lambda path, x: id(x) in place, ...)
    own_flat = nnx.to_flat_state(own)
    by_path = {path: x for path, x in nnx.iter_graph(call) if isinstance(x, nnx.Variable)}
    order = [place[id(by_path[path])] for path, _ in own_flat]
    inputs, rest_def = jax.tree.flatten(rest)
    own_def = jax.tree.structure(own)
    results: list[Result] = []

    def pure(full: Leaves, inputs: Leaves) -> Leaves:
        whole = [own_shape(variables[i], full[i]) for i in order]
        again = nnx.merge(graphdef, jax.tree.unflatten(own_def, whole), jax.tree.unflatten(rest_def, inputs))
        before = {path: x.get_raw_value() for path, x in _variables(again)}
        with new_order(modules=(again[0],)):
            out = original.func(again[0], *again[1], **again[2])
        changed = [(path, x) for path, x in _variables(again) if before.get(path) is not x.get_raw_value()]
        leaves, treedef = jax.tree.flatten(out)
        is_array = [isinstance(x, jax.Array) for x in leaves]
        static = tuple(None if array else x for x, array in zip(leaves, is_array, strict=True))
        results.append(Result(treedef, static, tuple(changed)))
        arrays = [x for x, array in zip(leaves, is_array, strict=True) if array]
        return arrays + [y for _, x in changed for y in jax.tree.leaves(x.get_value())]

    values, token = regathering(pure, gather, full, shards, inputs, token)
    return _finish(call, results[-1], values), token


def _finish(call: Any, result: Result, values: Leaves) -> Any:
    """Rebuilds the outputs, and carries changed variables over."""
    given = iter(values)
    leaves = [next(given) if x is None else x for x in result.leaves]
    changed = []
    for path, variable in result.changed:
        value = jax.tree.map(lambda _: next(given), variable.get_value())
        changed.append((path, variable.replace(value)))
    if changed:
        nnx.update(call, nnx.from_flat_state(changed))
    return jax.tree.unflatten(result.treedef, leaves)


def _variables(node: Any) -> list[tuple[Any, nnx.Variable[Any]]]:
    return [(path, x) for path, x in nnx.iter_graph(node) if isinstance(x, nnx.Variable)]
