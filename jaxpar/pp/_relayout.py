"""Values on their way between ranks of other shapes: how they lie between programs, and how they are laid out anew.

    rank 0 (dp 4, tp 1)      f32[2, 6, 8] that varies over {dp}          on each device
    rank 1 (dp 2, tp 2)      f32[4, 3, 8] that varies over {dp, tp}      on each device: dp splits dim 0, tp dim 1
    between programs         f32[1, 8, 6, 8], P(None, "dp", "tp"), on either

Which dim an axis splits is seen from the two shapes alone: that which is shorter by the ratio of the axis' sizes. A value per
rank, or a term of a sum, has no such dim, and no place on the other rank. An axis of equal sizes needs none: along it values
stay stacked, as everywhere else.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import _compat
from jaxpar._errors import ParallelizeError
from jaxpar._spec import as_spec, entries
from jaxpar.mesh._mesh import auto_mesh

Leaves = list[Any]
_ADVICE = (
    "What crosses to a rank of another shape must be one array, of which each rank of an axis has a block along one dim, or all "
    "have all of it. Split elsewhere, or give both ranks the same shape."
)


@dataclass(frozen=True)
class Side:
    """One side of a boundary.

    Args:
        mesh: of its rank.
        rows: how many rows of a microbatch each device has there, of each array of the batch.
    """

    mesh: Mesh
    rows: tuple[int, ...]

    def num(self, axes: tuple[str, ...]) -> int:
        """Ranks of some axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def varies(self, type_: Any, axes: tuple[str, ...]) -> bool | None:
        """Whether a value of this type varies over some axes, all together; None: over some of them only."""
        live = {axis for axis in axes if self.mesh.shape[axis] > 1}
        found = live & _compat.varying_axes(type_)
        return None if found not in (set(), live) else bool(found)


@dataclass(frozen=True)
class Boundary:
    """Where values pass from a rank to one of another shape.

    Args:
        source: the side that sends them.
        target: the side that receives them.
        row_axes: the axes that split the batch, as one: rows lie in their order.
        where: in words, for messages.
    """

    source: Side
    target: Side
    row_axes: tuple[str, ...]
    where: str

    def spec(self, sent: Any, received: Any) -> PartitionSpec:
        """How a value lies between programs, stacked dim first; right on both sides.

        Args:
            sent: its type on a device of the source.
            received: its type on a device of the target.

        Raises:
            ParallelizeError: nothing says how the value is split over an axis of which the sizes differ.
        """
        if sent.dtype != received.dtype or sent.ndim != received.ndim:
            raise ParallelizeError(f"{self._what(sent, received)}: they are no parts of one array. {_ADVICE}")
        lies: list[tuple[str, ...]] = [()] * (1 + sent.ndim)
        for group in self._groups(sent, received):
            if self._is_stacked(group, sent, received):
                lies[0] = (*lies[0], *group)
            elif self._is_split(group, sent, received):
                dim = self._dim(group, sent, received)
                lies[1 + dim] = (*lies[1 + dim], *group)
        for dim, names in enumerate(lies[1:]):
            if sent.shape[dim] * self.source.num(names) != received.shape[dim] * self.target.num(names):
                raise ParallelizeError(
                    f"{self._what(sent, received)}: no axis splits dim {dim} alone. {_ADVICE}"
                )
        return as_spec(lies)

    def _groups(self, sent: Any, received: Any) -> list[tuple[str, ...]]:
        """The axes one by one, those that split the batch together if the value has its rows."""
        names = self.source.mesh.axis_names
        has_rows = self.source.varies(sent, self.row_axes), self.target.varies(received, self.row_axes)
        if None in has_rows or not any(has_rows):
            return [(axis,) for axis in names]
        return [self.row_axes, *((axis,) for axis in names if axis not in self.row_axes)]

    def _is_stacked(self, group: tuple[str, ...], sent: Any, received: Any) -> bool:
        """Whether nothing need be known of axes: they have as many ranks on both sides."""
        is_same = self.source.num(group) == self.target.num(group)
        return is_same and bool(self.source.varies(sent, group) and self.target.varies(received, group))

    def _is_split(self, group: tuple[str, ...], sent: Any, received: Any) -> bool:
        """Whether axes split the value, on both sides if both have several ranks."""
        sides = ((self.source, sent), (self.target, received))
        varies = {side.varies(type_, group) for side, type_ in sides if side.num(group) > 1}
        if len(varies) > 1:
            raise ParallelizeError(
                f"{self._what(sent, received)}: it differs between the ranks of {_named(group)} on one side only. {_ADVICE}"
            )
        return True in varies

    def _dim(self, group: tuple[str, ...], sent: Any, received: Any) -> int:
        """The dim that axes split."""
        source, target = self.source.num(group), self.target.num(group)
        pairs = enumerate(zip(sent.shape, received.shape, strict=True))
        if group == self.row_axes:  # no multiple of the rows: [x; y] of each rank's own would be cut apart
            rows = set(zip(self.source.rows, self.target.rows, strict=True))
            found = [dim for dim, pair in pairs if pair in rows]
        else:
            found = [dim for dim, (here, there) in pairs if here * source == there * target]
        if len(found) != 1:
            raise ParallelizeError(
                f"{self._what(sent, received)}: it differs between the ranks of {_named(group)}, of which there are {source} and "
                f"{target}, and {'no dim' if not found else f'more than one dim ({found})'} is split in this ratio. {_ADVICE}"
            )
        return found[0]

    def _what(self, sent: Any, received: Any) -> str:
        shapes = (f"{dict(side.mesh.shape)}" for side in (self.source, self.target))
        types = (f"{t.dtype}{list(t.shape)}" for t in (sent, received))
        return "pipeline: {}, a value is {} on each device of {} and {} on each device of {}".format(
            self.where, *(x for pair in zip(types, shapes, strict=True) for x in pair)
        )


def _named(group: tuple[str, ...]) -> str:
    return " and ".join(map(repr, group))


def live(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """A spec without the axes that have one rank on a mesh: nothing varies over them."""
    names = entries(spec, len(spec))
    return PartitionSpec(*(tuple(axis for axis in some if mesh.shape[axis] > 1) or None for some in names))


@functools.lru_cache(maxsize=64)
def reshaped(mesh: Mesh, like: Mesh) -> Mesh:
    """The devices of a mesh in the shape of another one with the same axes."""
    return auto_mesh(mesh.devices.reshape(like.devices.shape), like.axis_names)


def relaid(values: Leaves, shardings: Sequence[NamedSharding]) -> Leaves:
    """The same arrays in other shardings over the same devices; where those keep what they have, nothing runs."""
    pairs = list(zip(values, shardings, strict=True))
    if all(x.sharding.is_equivalent_to(sharding, x.ndim) for x, sharding in pairs):
        return [x if x.sharding == sharding else jax.device_put(x, sharding) for x, sharding in pairs]
    return _relaying(tuple(shardings))(values)


@functools.lru_cache(maxsize=256)
def _relaying(shardings: tuple[NamedSharding, ...]) -> Any:
    return jax.jit(lambda values: values, out_shardings=list(shardings))
