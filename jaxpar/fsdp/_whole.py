"""All units of a model at once: gathered before a loop, their gradients scattered after it.

    shards  --all-gather, once per wire-->  whole parameters  -->  n microbatches, gradients added up whole
    shards' gradients  <--reduce-scatter, once per wire--  the sums

Everything here runs inside `jax.shard_map`, on flat lists of leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpar._after import number_of
from jaxpar._errors import ParallelizeError
from jaxpar._module import vary
from jaxpar._record import record_of
from jaxpar.fsdp._unit import Group, Unit, live_axes, own_variables, unit_of
from jaxpar.fsdp._unshard import Gather

Leaves = list[jax.Array]
Variable = nnx.Variable[Any]


@dataclass(frozen=True)
class Members:
    """The leaves of one unit.

    Args:
        unit: what it was asked to be.
        variables: its parameters, for their records.
        leaves: their positions in the list of leaves.
    """

    unit: Unit
    variables: tuple[Variable, ...]
    leaves: tuple[int, ...]

    def shards(self, leaves: Sequence[jax.Array]) -> Leaves:
        """This device's parts; on replicas each for itself, so that trained and frozen ones travel together."""
        axes = live_axes(self.unit.replicate_axes)
        mine = zip(self.variables, (leaves[i] for i in self.leaves), strict=True)
        return [vary(x, axes) if record_of(v) else x for v, x in mine]


@dataclass(frozen=True)
class Units:
    """The units of a model; each parameter in one of them, also if several reach it.

    Args:
        members: one entry for each unit.
    """

    members: tuple[Members, ...]

    @classmethod
    def of(cls, model: nnx.Module, variables: Sequence[Variable]) -> "Units":
        """Finds the units of a model.

        Args:
            model: the whole model.
            variables: its variables, in the order of the leaves.

        Raises:
            ParallelizeError: units of different dtypes share a parameter.
        """
        place = {id(v): i for i, v in enumerate(variables)}
        taken: dict[int, Unit] = {}
        found: dict[Any, tuple[Unit, list[Variable]]] = {}
        for path, module in nnx.iter_modules(model):
            unit = unit_of(module)
            if unit is None:
                continue
            _, mine = found.setdefault(_identity(path, unit.group), (unit, []))
            for variable in own_variables(module):
                if id(variable) not in taken:
                    mine.append(variable)
                _check_shared(taken.setdefault(id(variable), unit), unit, path)
        return cls(
            tuple(Members(u, tuple(vs), tuple(place[id(v)] for v in vs)) for u, vs in found.values() if vs)
        )

    def among(self, which: Sequence[int]) -> "Units":
        """The same for some of the leaves, which then are numbered as they are listed here."""
        place = {leaf: i for i, leaf in enumerate(which)}
        members = []
        for each in self.members:
            kept = [(v, place[i]) for v, i in zip(each.variables, each.leaves, strict=True) if i in place]
            if kept:
                members.append(Members(each.unit, tuple(v for v, _ in kept), tuple(i for _, i in kept)))
        return Units(tuple(members))

    @property
    def leaves(self) -> frozenset[int]:
        """The positions of all leaves that are in a unit."""
        return frozenset(i for each in self.members for i in each.leaves)

    def gather(self, leaves: Sequence[jax.Array]) -> Leaves:
        """The whole parameters in place of this device's parts, in the dtypes that compute; one unit after the other."""
        out, before = list(leaves), []
        for each in self.members:
            shards = each.shards(leaves)
            whole = each.unit.gather(each.variables, shards).again(shards, before)
            for leaf, value in zip(each.leaves, whole, strict=True):
                out[leaf] = value
            before = [number_of(whole)]
        return out

    def scatter(self, grads: Sequence[Any], leaves: Sequence[jax.Array]) -> list[Any]:
        """This device's parts of the summed gradients; the rest of `grads` unchanged.

        Args:
            grads: gradients of the whole parameters, of whatever precision they were added up in, which the result
                has too; they travel in the dtype that the unit's policy says. None: not wanted.
            leaves: this device's parts of the parameters.
        """
        out, before = list(grads), []
        for each in self.members:
            mine, shards = [grads[i] for i in each.leaves], each.shards(leaves)
            parts = _scatter(each.unit, each.unit.gather(each.variables, shards), mine, shards, before)
            for leaf, part in zip(each.leaves, parts, strict=True):
                out[leaf] = part
            before = [number_of([part for part in parts if part is not None])]
        return out


def _scatter(
    unit: Unit, gather: Gather, grads: list[Any], shards: Leaves, after: Sequence[jax.Array]
) -> list[Any]:
    like = [
        x if g is None else jax.ShapeDtypeStruct(x.shape, g.dtype) for g, x in zip(grads, shards, strict=True)
    ]
    wires = gather.wires(gather.cast(shards), [g is not None for g in grads])
    sent = list(grads)
    for i in (leaf for wire in wires for leaf in wire.leaves):  # in the dtype that a backward pass would send
        sent[i] = grads[i].astype(unit.policy.reduce_dtype or unit.policy.param_dtype or shards[i].dtype)
    return gather.scatter(sent, wires, like, after)


def _identity(path: Any, group: Group | None) -> Any:
    return path if group is None else group


def _check_shared(first: Unit, second: Unit, path: Any) -> None:
    ours, theirs = first.policy.param_dtype, second.policy.param_dtype
    if ours != theirs:
        raise ParallelizeError(
            f"TrainStep(accumulate_unsharded=True): {'.'.join(map(str, path)) or 'the model itself'} shares a parameter "
            f"with another unit, but one computes in {ours} and the other in {theirs} (MixedPrecisionPolicy.param_dtype). "
            f"Shared parameters are gathered once, in one dtype: give both units the same policy."
        )
