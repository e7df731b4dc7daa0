"""What a sharded module does when it is called.

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
from jaxpar._errors import ParallelizeError
from jaxpar._module import manual_axes, vary
from jaxpar._pytree import leaf_name
from jaxpar.fsdp._offload import on_device
from jaxpar.fsdp._order import Order, are_parameters_whole, current_order
from jaxpar.fsdp._policy import MixedPrecisionPolicy, cast_floating
from jaxpar.fsdp._record import own_shape, record_of
from jaxpar.fsdp._run import run_regathering
from jaxpar.fsdp._unshard import Gather

UNIT = "_jaxpar_fsdp_unit"
Variable = nnx.Variable[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The identity of a unit that consists of several modules."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """What `fully_shard` was asked for; an attribute of the module's class.

    Args:
        shard_axes: mesh axes over which parameters are sharded, the first varying slowest.
        replicate_axes: mesh axes over which the shards are replicated (HSDP).
        reshard: gather again in the backward: True, False, None (see `fully_shard`), or the inner axes over which
            parameters stay sharded in between.
        policy: dtypes.
        prefetch: how many units ahead a gather may start.
        flatten_below_bytes: leaves smaller than this share a flat buffer.
        send_as_integers: see `Gather`.
        group: the unit that this module is a part of, if it has several.
    """

    shard_axes: tuple[str, ...]
    replicate_axes: tuple[str, ...]
    reshard: bool | None | tuple[str, ...]
    policy: MixedPrecisionPolicy
    prefetch: int
    flatten_below_bytes: int
    send_as_integers: bool
    group: Group | None = None

    def gather(self, variables: Sequence[Variable], shards: Sequence[jax.Array]) -> Gather:
        """How the unit's parameters are gathered here."""
        axes = _live(self.shard_axes)
        return Gather(
            dims=tuple(_dim(v, x, axes) for v, x in zip(variables, shards, strict=True)),
            axes=axes,
            policy=self.policy,
            flatten_below_bytes=self.flatten_below_bytes,
            send_as_integers=self.send_as_integers,
        )


def unit_of(module: Any) -> Unit | None:
    """Returns the unit that the module is, or None."""
    return getattr(type(module), UNIT, None)


def named_own_variables(module: nnx.Module) -> list[tuple[str, Variable]]:
    """The parameters that the module reaches other than through another unit, each once, with their dotted names."""

    def is_leaf(x: Any) -> bool:
        return isinstance(x, nnx.Variable) or (x is not module and unit_of(x) is not None)

    leaves, _ = jax.tree_util.tree_flatten_with_path(module, is_leaf=is_leaf)
    found = {id(x): (leaf_name(path), x) for path, x in reversed(leaves) if isinstance(x, nnx.Param)}
    return list(reversed(found.values()))


def own_variables(module: nnx.Module) -> list[Variable]:
    """The parameters of `named_own_variables`."""
    return [variable for _, variable in named_own_variables(module)]


def has_inner_units(module: nnx.Module) -> bool:
    """Whether another unit lies inside."""
    return any(x is not module and unit_of(x) is not None for _, x in nnx.iter_modules(module))


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
    shards = [v.get_value() for v in variables]
    if are_parameters_whole() or not any(_is_shard(v, x) for v, x in zip(variables, shards, strict=True)):
        whole = cast_floating(shards, unit.policy.param_dtype)
        with _assigned(variables, _own(variables, whole)), order.inside(self):
            return original(*args, **kwargs)
    started = number_of(
        [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array) and _is_number(x)][:1]
    )
    started = jax.lax.stop_gradient(started)
    full = gather_unit(self, unit, variables, order, after=[_earlier(order.started, unit.prefetch, started)])
    order.started.append(started)
    reshard = _reshards(self, unit, order)
    if reshard is False:
        with _assigned(variables, _own(variables, full)), order.inside(self):
            return original(*args, **kwargs)
    again = unit.gather(variables, shards)
    if reshard is not True:
        again = dataclasses.replace(again, axes=_live(reshard), policy=MixedPrecisionPolicy())
        shards = _pieces(full, again)
    token = _earlier(order.tokens, unit.prefetch, jnp.float32(0))
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
        vary(v.get_value(), _live(unit.replicate_axes)) if record_of(v) else v.get_value() for v in variables
    ]
    full, order.scatter_token = unit.gather(variables, shards)(shards, order.scatter_token, after)
    return full


def _group_of(module: Any) -> Group | None:
    unit = unit_of(module)
    return None if unit is None else unit.group


def _reshards(self: Any, unit: Unit, order: Order) -> bool | tuple[str, ...]:
    if unit.reshard is None:
        return self is not order.root and not has_inner_units(self)
    return unit.reshard


def _live(axes: Sequence[str]) -> tuple[str, ...]:
    """The manual axes among these that have more than one device."""
    manual = manual_axes()
    return tuple(a for a in axes if a in manual and jax.lax.axis_size(a) > 1)


def _dim(variable: Variable, shard: jax.Array, axes: tuple[str, ...]) -> int | None:
    """The dim to gather along; None for what is whole: replicated, or gathered by a unit around this one."""
    record = record_of(variable)
    if record is None or record.dim is None or not axes or not record.is_shard(shard):
        return None
    return record.dim % shard.ndim


def _own(variables: Sequence[Variable], whole: Sequence[jax.Array]) -> list[jax.Array]:
    return [own_shape(v, x) for v, x in zip(variables, whole, strict=True)]


def _is_shard(variable: Variable, x: jax.Array) -> bool:
    record = record_of(variable)
    if record is not None and record.shape is None and x.ndim < -(record.dim or 0):
        raise ParallelizeError(
            f"a parameter was sharded along dim {record.dim} (counted from the last), but inside the unit it is "
            f"{x.dtype}{list(x.shape)}: nnx.scan or nnx.vmap has taken the stacked layer dim away, and with it the sharding. Keep "
            f"that dim whole: fully_shard(..., shard_dim_fn=lambda name, x: 1)."
        )
    return record is not None and record.is_shard(x)


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
    with _assigned(variables, usable) if any(map(operator.is_not, usable, stored)) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _assigned(variables: Sequence[Variable], values: Sequence[jax.Array]) -> Iterator[None]:
    """Within the block the variables hold other values."""
    before = [v.get_value() for v in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            variable.set_value(value)
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.set_value(value)
