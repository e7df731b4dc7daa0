"""Arrays of stages as arrays of the whole mesh, and back, without a copy: each device's part stays where it is.

    stage 0 on rank 0    f32[8, 4]          rank 0   [8, 4] of stage 0
    stage 1 on rank 1    f32[8, 4]    ->    rank 1   [8, 4] of stage 1        f32[2 * 8, 4], dim 0 split over pp
    stage 2 on rank 0    f32[8, 4]          slot 0; stage 2 takes slot 1

A slot holds arrays of one shape, dtype and layout, one for each rank. A rank whose stages have none of it lends zeros of that
size, made once: an embedding that only the first stage has takes room on all ranks.
"""

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Leaves = list[Any]


@dataclass(frozen=True)
class Layout:
    """How an array of a stage lies on its devices: its shape, its dtype, and for each dim the axes that split it."""

    shape: tuple[int, ...]
    dtype: Any
    spec: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, x: Any) -> "Layout":
        """Of an array, or an abstract one with a sharding; it has at least one dim."""
        entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in x.sharding.spec]
        return cls(x.shape, x.dtype, (*entries, *[()] * (x.ndim - len(entries))))


@dataclass(frozen=True, eq=False)
class Slots:
    """The slots of one role (parameters, gradients...) of all stages.

    Args:
        mesh: the whole mesh.
        axis: the pipeline's.
        rank_of_stage: where each stage lies.
        layouts: of each slot.
        places: for each stage, the slot of each of its arrays.
    """

    mesh: Mesh
    axis: str
    rank_of_stage: tuple[int, ...]
    layouts: tuple[Layout, ...]
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, mesh: Mesh, axis: str, rank_of_stage: tuple[int, ...], arrays: Sequence[Sequence[Any]]
    ) -> "Slots":
        """Slots for the arrays of each stage."""
        layouts: list[Layout] = []
        slots_of = collections.defaultdict[Layout, list[int]](list)
        taken = [collections.Counter[Layout]() for _ in range(mesh.shape[axis])]
        places = []
        for rank, some in zip(rank_of_stage, arrays, strict=True):
            mine = []
            for layout in map(Layout.of, some):
                if taken[rank][layout] == len(slots_of[layout]):
                    slots_of[layout].append(len(layouts))
                    layouts.append(layout)
                mine.append(slots_of[layout][taken[rank][layout]])
                taken[rank][layout] += 1
            places.append(tuple(mine))
        return cls(mesh, axis, rank_of_stage, tuple(layouts), tuple(places))

    @property
    def specs(self) -> list[PartitionSpec]:
        """How the slots lie on the whole mesh."""
        return [
            PartitionSpec((self.axis, *x.spec[0]), *(e or None for e in x.spec[1:])) for x in self.layouts
        ]

    @property
    def abstract(self) -> Leaves:
        """The slots without values."""
        return [
            jax.ShapeDtypeStruct(self._shape(layout), layout.dtype, sharding=NamedSharding(self.mesh, spec))
            for layout, spec in zip(self.layouts, self.specs, strict=True)
        ]

    def _shape(self, layout: Layout) -> tuple[int, ...]:
        return (self.mesh.shape[self.axis] * layout.shape[0], *layout.shape[1:])


class Assembly:
    """Puts arrays of stages into slots and takes them out; keeps the zeros that fill what is missing.

    Args:
        slots: of one role.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots, self._abstract = slots, slots.abstract
        self._fillers: dict[tuple[int, Any], jax.Array] = {}
        ranks = slots.mesh.shape[slots.axis]
        devices = np.moveaxis(slots.mesh.devices, slots.mesh.axis_names.index(slots.axis), 0).reshape(
            ranks, -1
        )
        here = jax.process_index()
        self._devices = [[d for d in row if d.process_index == here] for row in devices]
        self._lent = [
            [d for rank, some in enumerate(self._devices) if rank not in self._holders(slot) for d in some]
            for slot in range(len(slots.layouts))
        ]

    def joined(self, arrays: Sequence[Leaves]) -> Leaves:
        """The slots, filled with the arrays of each stage."""
        parts: list[Leaves] = [[] for _ in self._abstract]
        for some, places in zip(arrays, self._slots.places, strict=True):
            for x, slot in zip(some, places, strict=False):  # none of a stage that is not here
                parts[slot] += [shard.data for shard in x.addressable_shards]
        for slot, devices in enumerate(self._lent):
            parts[slot] += [self._filler(slot, device) for device in devices]
        return [
            jax.make_array_from_single_device_arrays(x.shape, x.sharding, some)
            for x, some in zip(self._abstract, parts, strict=True)
        ]

    def parted(self, slots: Leaves, like: Sequence[Leaves]) -> list[Leaves]:
        """The arrays of each stage, lying as others that went into the slots; fillers are kept for the next time."""
        found = [{shard.device: shard.data for shard in x.addressable_shards} for x in slots]
        for slot, devices in enumerate(self._lent):
            self._fillers |= {(slot, device): found[slot][device] for device in devices}
        return [
            [_of_stage(x, found[slot]) for x, slot in zip(some, places, strict=False)]
            for some, places in zip(like, self._slots.places, strict=True)
        ]

    def _holders(self, slot: int) -> set[int]:
        """The ranks that have something of their own in a slot."""
        placed = zip(self._slots.rank_of_stage, self._slots.places, strict=True)
        return {rank for rank, places in placed if slot in places}

    def _filler(self, slot: int, device: Any) -> jax.Array:
        if (slot, device) not in self._fillers:
            x = self._abstract[slot]
            zeros = jnp.zeros(x.sharding.shard_shape(x.shape), x.dtype, device=device)
            self._fillers[slot, device] = zeros
        return self._fillers[slot, device]


def _of_stage(like: Any, parts: dict[Any, jax.Array]) -> jax.Array:
    mine = [parts[device] for device in like.sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, mine)
