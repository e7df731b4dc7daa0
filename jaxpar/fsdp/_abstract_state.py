"""The optimizer state of an abstract model, sharded as its parameters are: for programs compiled for devices elsewhere.

    nnx.eval_shape(lambda m: nnx.Optimizer(m, tx, wrt=nnx.Param), model)    mu: f32[4096, 1024]              on no device
    follow_parameters(optimizer, model)                                     mu: f32[4096, 1024] @ P("dp")    as its parameter

A concrete optimizer needs none of this: `zeros_like` of a sharded array is sharded.
"""

from typing import Any

import jax
from flax import nnx


def follow_parameters(optimizer: nnx.Optimizer, model: nnx.Module) -> None:
    """Gives abstract state of a parameter's path and shape the parameter's sharding, in place; nothing else changes.

    Args:
        optimizer: made by `nnx.eval_shape`.
        model: the abstract model that it trains, after `fully_shard`.
    """
    parameters = {path: x.get_value() for path, x in _variables(model)}
    for path, state in _variables(optimizer):
        value = state.get_value()
        if not isinstance(value, jax.ShapeDtypeStruct) or value.sharding is not None:
            continue
        owner = next((parameters[path[i:]] for i in range(1, len(path)) if path[i:] in parameters), None)
        if owner is not None and owner.shape == value.shape:
            state.set_value(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=owner.sharding))


def _variables(module: nnx.Pytree) -> list[tuple[tuple[Any, ...], nnx.Variable[Any]]]:
    return [(path, x) for path, x in nnx.iter_graph(module) if isinstance(x, nnx.Variable)]
