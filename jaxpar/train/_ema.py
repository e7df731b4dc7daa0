"""A moving average of the parameters, kept by the optimizer, and a way to evaluate it.

after each update    average <- average + c (parameters - average),   c = (1 - decay) / weight,   weight <- decay weight + 1 - decay

The average is optimizer state of the parameters' shapes: it is sharded, cut into stages and saved as Adam's moments are, and
nothing moves. It is kept without bias, so that nothing is left to correct where it is read.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._module import ModuleT
from jaxpar._named import dotted
from jaxpar._pytree import PyTree
from jaxpar.pp._ranks import elsewhere


class EmaState(NamedTuple):
    """What `ema` keeps.

    Args:
        num_updates: how many there were.
        weight: how much of the average came from updates, and not from what it would have begun with.
        average: of the parameters, in fp32 at least.
    """

    num_updates: jax.Array
    weight: jax.Array
    average: PyTree


def ema(
    decay: float | Callable[[jax.Array], jax.Array | float], *, debias: bool = True
) -> optax.GradientTransformation:
    """Averages the parameters that come out of each update; put it last: `optax.chain(optax.adamw(1e-3), ema(0.999))`.

    Updates pass through unchanged. Any layout: nothing moves. `optax.ema` averages updates, this one parameters.

    Args:
        decay: weight of the average before, from 0 to below 1; or a function of the number of updates before this one, such as
            `lambda n: n / (n + 1)`, the mean of all (SWA), or `lambda n: jnp.minimum(0.999, (1 + n) / (10 + n))`.
        debias: the average is one of updated parameters only, as if it began with the first ones. False: it begins with the parameters for
            which the optimizer was built.

    Returns:
        An optax transformation; its state is found by `averaged`.

    Raises:
        ParallelizeError: a decay that is none.

    Source: `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`; debiased as Adam, arXiv 1412.6980.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar.train import ema
        >>> tx = optax.chain(optax.sgd(1.0), ema(0.5))
        >>> params, state = jnp.array(0.0), tx.init(jnp.array(0.0))
        >>> for _ in range(2):
        ...     updates, state = tx.update(jnp.array(-1.0), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(params), round(float(state[-1].average), 4)  # (0.25 * 1 + 0.5 * 2) / 0.75
        (2.0, 1.6667)
    """
    if not callable(decay) and not 0 <= decay < 1:
        raise ParallelizeError(
            f"ema: decay={decay} is the weight of the average before, from 0 to below 1. Write ema(0.999), or a function of "
            f"the number of updates."
        )

    def init(params: PyTree) -> EmaState:
        def copy(x: Any) -> jax.Array:
            return jnp.array(x, jnp.promote_types(x.dtype, jnp.float32))

        weight = jnp.zeros(()) if debias else jnp.ones(())
        return EmaState(jnp.zeros((), jnp.int32), weight, jax.tree.map(copy, params))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, EmaState]:
        if params is None:
            raise ParallelizeError("ema: averages parameters: call tx.update(updates, state, params).")
        kept = decay(state.num_updates) if callable(decay) else decay
        weight = kept * state.weight + (1 - kept)
        share = (1 - kept) / weight

        def step(average: jax.Array, new: jax.Array) -> jax.Array:
            return average + jnp.asarray(share, average.dtype) * (new.astype(average.dtype) - average)

        average = jax.tree.map(step, state.average, optax.apply_updates(params, updates))
        return updates, EmaState(state.num_updates + 1, jnp.asarray(weight, state.weight.dtype), average)

    return optax.GradientTransformation(init, update)


@contextlib.contextmanager
def averaged(model: ModuleT, optimizer: nnx.Optimizer) -> Iterator[ModuleT]:
    """Within the block the model has the averaged parameters, and afterwards its own again.

    For evaluation and export: `step.evaluate`, `model(x)`, `full_state(model)`. Nothing is copied where dtypes and layouts are
    equal, so do not train within; with ZeRO-1 averages are gathered as parameters are. Running statistics of BatchNorm stay those of training. Of a `LocalSGDStep`, the outer optimizer can
    keep an average: `averaged(model, step.state.outer)`.

    Args:
        model: the model that is trained.
        optimizer: its optimizer, with one `ema` in it; of parameters that it masks nothing is averaged, and they stay.

    Raises:
        ParallelizeError: the optimizer has no `ema`, two averages of a parameter, or those of another model.

    Source: `AveragedModel.module`, and `swap` of parameters around an evaluation.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> from jaxpar.train import averaged, ema
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.chain(optax.sgd(1.0), ema(0.5)), wrt=nnx.Param)
        >>> for _ in range(2):
        ...     _ = optimizer.update(model, nnx.grad(lambda m: -m.bias[0])(model))
        >>> with averaged(model, optimizer):
        ...     inside = float(model.bias[0])
        >>> round(inside, 4), float(model.bias[0])
        (1.6667, 2.0)
    """
    variables = {path: x for path, x in nnx.iter_graph(model) if isinstance(x, nnx.Variable)}
    averages = _averages(optimizer)
    for path, average in averages.items():
        if path not in variables or variables[path].get_value().shape != average.shape:
            raise ParallelizeError(
                f"averaged: the optimizer has an average of {dotted(path)}, {average.dtype}{list(average.shape)}, and the model has "
                f"{_described(variables.get(path))}. Give the model for which the optimizer was built; the optimizer of a LocalSGDStep "
                f"has averages of each replica: put ema into its outer optimizer."
            )
    before = {path: variables[path].get_value() for path in averages}
    try:
        for path, average in averages.items():
            variables[path].set_value(_stored_as(before[path], average))
        yield model
    finally:
        for path, value in before.items():
            variables[path].set_value(value)


def _averages(optimizer: nnx.Optimizer) -> dict[tuple[Any, ...], jax.Array]:
    """By the path of the parameter."""
    nodes = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda x: isinstance(x, EmaState))
    states = [node for node in nodes if isinstance(node, EmaState)]
    found = [
        (path, variable.get_value())
        for state in states
        for path, variable in nnx.to_flat_state(state.average)
        if hasattr(variable.get_value(), "shape")  # that of a masked parameter is no array
    ]
    paths = [path for path, _ in found]
    twice = [dotted(path) for path in paths if paths.count(path) > 1]
    if twice or not states:
        raise ParallelizeError(
            f"averaged: the optimizer keeps {'two averages of ' + twice[0] if twice else 'no average of the parameters'}. Build it with one: "
            f"nnx.Optimizer(model, optax.chain(tx, jaxpar.train.ema(0.999)), wrt=nnx.Param)."
        )
    return dict(found)


def _stored_as(parameter: jax.Array, average: jax.Array) -> jax.Array:
    """In the parameter's dtype and layout; with ZeRO-1 the average is cut and its parameter is not."""
    if not average.addressable_shards:  # of a stage on other processes
        return elsewhere(parameter)
    if average.dtype == parameter.dtype and average.sharding == parameter.sharding:
        return average
    return jax.jit(lambda x: x.astype(parameter.dtype), out_shardings=parameter.sharding)(average)


def _described(variable: Any) -> str:
    if variable is None:
        return "no such variable"
    value = variable.get_value()
    return f"{value.dtype}{list(value.shape)}"
