"""A unit: a module (or several) whose parameters are gathered together.

model            unit: embedding, last norm, head      (what no inner unit reaches)
  blocks.0       unit: all parameters of the block
  blocks.1       unit
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._module import manual_axes
from jaxpar._pytree import leaf_name
from jaxpar._record import record_of
from jaxpar.fsdp._policy import MixedPrecisionPolicy
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
        return Gather(
            dims=tuple(_dim(v, x, self.shard_axes) for v, x in zip(variables, shards, strict=True)),
            axes=live_axes(self.shard_axes),
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


def live_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """The manual axes among these that have more than one device."""
    manual = manual_axes()
    return tuple(a for a in axes if a in manual and jax.lax.axis_size(a) > 1)


def is_shard(variable: Variable, x: jax.Array) -> bool:
    """Whether the array that a unit finds in a variable is a part; false if one device holds all, or it is gathered.

    Raises:
        ParallelizeError: the sharded dim is not there any more.
    """
    record = record_of(variable)
    if record is not None and record.shape is None and x.ndim < -(record.dim or 0):
        raise ParallelizeError(
            f"a parameter was sharded along dim {record.dim} (counted from the last), but inside the unit it is "
            f"{x.dtype}{list(x.shape)}: nnx.scan or nnx.vmap has taken the stacked layer dim away, and with it the sharding. Keep "
            f"that dim whole: fully_shard(..., shard_dim_fn=lambda name, x: 1)."
        )
    return record is not None and record.is_shard(x)


def _dim(variable: Variable, x: jax.Array, axes: tuple[str, ...]) -> int | None:
    """The dim to gather along; None for what is whole."""
    record = record_of(variable)
    if record is None or record.dim is None or not is_shard(variable, x):
        return None
    if record.axes != axes:
        raise ParallelizeError(
            f"two units share a parameter ({x.dtype}{list(x.shape)} per device), but it is sharded over {record.axes} and one of "
            f"them gathers over {axes}. Shard both over the same axes."
        )
    return record.dim % x.ndim
