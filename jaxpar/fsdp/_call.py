"""What a unit does when one of its methods is called.

training step (manual axes)   gather own parameters -> the module's code -> free; in the backward gather again
global view                   the plain module: XLA's partitioner gathers what it needs
"""

import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar._after import number_of
from jaxpar._module import manual_axes, vary
from jaxpar._record import own_shape, record_of
from jaxpar.fsdp._offload import on_device
from jaxpar.fsdp._order import Order, current_order
from jaxpar.fsdp._policy import MixedPrecisionPolicy, cast_floating
from jaxpar.fsdp._run import run_regathering
from jaxpar.fsdp._unit import UNIT, Group, Unit, has_inner_units, is_shard, live_axes, own_variables, unit_of
from jaxpar.fsdp._unshard import Gather

Variable = nnx.Variable[Any]


def call_unit(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The body of a unit's methods; `original` is the method of the module's own class, bound."""
    unit: Unit = getattr(type(self), UNIT)
    if not set(unit.shard_axes) & set(manual_axes()):
        with _usable(own_variables(self)):
            return original(*args, **kwargs)
    with current_order() as order:
        if order.is_running(self):
            return original(*args, **kwargs)
        args, kwargs = unit.policy.cast_inputs((args, kwargs))
        return unit.policy.cast_outputs(_call(original, self, unit, order, args, kwargs))


def _call(
    original: Any, self: Any, unit: Unit, order: Order, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    variables = own_variables(self)
    shards = [v.get_raw_value() for v in variables]
    if not any(map(is_shard, variables, shards)):
        whole = cast_floating(shards, unit.policy.param_dtype)
        with _assigned(variables, _own(variables, whole)), order.inside(self):
            return original(*args, **kwargs)
    started = number_of(
        [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array) and _is_number(x)][:1]
    )
    started = jax.lax.stop_gradient(started)
    after = [] if order.is_cut and self is order.root else [_earlier(order.started, unit.prefetch, started)]
    full = gather_unit(self, unit, variables, order, after)
    order.started.append(started)
    reshard = _reshards(self, unit, order)
    if reshard is False:
        with _assigned(variables, _own(variables, full)), order.inside(self):
            return original(*args, **kwargs)
    again = unit.gather(variables, shards)
    if reshard is not True:
        again = dataclasses.replace(again, axes=live_axes(reshard), policy=MixedPrecisionPolicy())
        shards = _pieces(full, again)
    token = _earlier(order.tokens, unit.prefetch, jnp.float32(0)) if unit.prefetch else None
    out, token = run_regathering(original, self, variables, full, shards, again.again, token, args, kwargs)
    order.tokens.append(token)
    return out


def gather_unit(
    self: Any, unit: Unit, variables: Sequence[Variable], order: Order, after: Sequence[jax.Array]
) -> list[jax.Array]:
    """The parameters of a unit, whole; of a unit of several modules those of all at the first one's call."""
    if unit.group is None or order.root is None:
        return _gather(unit, variables, order, after)
    if not all(id(v) in order.gathered for v in variables):
        modules = [m for _, m in nnx.iter_modules(order.root) if _group_of(m) is unit.group]
        together = list({id(v): v for m in modules for v in own_variables(m)}.values())
        whole = _gather(unit, together, order, after)
        order.gathered.update({id(v): x for v, x in zip(together, whole, strict=True)})
    return [order.gathered[id(v)] for v in variables]


def _gather(
    unit: Unit, variables: Sequence[Variable], order: Order, after: Sequence[jax.Array]
) -> list[jax.Array]:
    # Summed over the replicas as shards, after the reduce-scatter: the transpose of this cast.
    shards = [
        vary(v.get_raw_value(), live_axes(unit.replicate_axes)) if record_of(v) else v.get_raw_value()
        for v in variables
    ]
    # In the backward, units two further ahead than the prefetch wait for this reduce-scatter. XLA:GPU puts off gradients of
    # weights to hide collectives under them, and keeps what they need of all units alive.
    token = order.scatter_token + _earlier(order.tokens, max(unit.prefetch, 1) + 2, jnp.float32(0))
    full, order.scatter_token = unit.gather(variables, shards)(shards, token, after)
    return full


def _group_of(module: Any) -> Group | None:
    unit = unit_of(module)
    return None if unit is None else unit.group


def _reshards(self: Any, unit: Unit, order: Order) -> bool | tuple[str, ...]:
    if unit.reshard is None:
        return self is not order.root and not has_inner_units(self)
    return unit.reshard


def _own(variables: Sequence[Variable], whole: Sequence[jax.Array]) -> list[jax.Array]:
    return [own_shape(v, x) for v, x in zip(variables, whole, strict=True)]


def _pieces(full: Sequence[jax.Array], gather: Gather) -> list[jax.Array]:
    """This device's part of each whole leaf, if it is kept over the inner axes only. Nothing moves."""
    rank, num = jax.lax.axis_index(gather.axes), gather.num_ranks
    return [
        x
        if dim is None
        else jax.lax.dynamic_slice_in_dim(x, rank * (x.shape[dim] // num), x.shape[dim] // num, dim)
        for x, dim in zip(full, gather.dims, strict=True)
    ]


def _earlier(values: Sequence[jax.Array], distance: int, own: jax.Array) -> jax.Array:
    """The value of the unit `distance` calls ago; this call's own if there were not so many yet."""
    return values[-distance] if 0 < distance <= len(values) else own


def _is_number(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.number))


@contextlib.contextmanager
def _usable(variables: Sequence[Variable]) -> Iterator[None]:
    """In global view: flat variables in the shape that the module's code expects, those in host memory on the device."""
    stored = [v.get_value() for v in variables]
    usable = _own(variables, [on_device(x) for x in stored])
    with (
        _assigned(variables, usable)
        if any(map(operator.is_not, usable, stored))
        else contextlib.nullcontext()
    ):
        yield


@contextlib.contextmanager
def _assigned(variables: Sequence[Variable], values: Sequence[jax.Array]) -> Iterator[None]:
    """Within the block the variables hold other values."""
    before = [v.get_raw_value() for v in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            variable.set_value(value)
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.set_value(value)
