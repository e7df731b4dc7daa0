"""The ranks of a pipeline: which devices they have, which of them this process runs, how arrays get from one to another.

mesh (pp 2, dp 2), two processes      rank 0    devices 0 1     process 0
                                      rank 1    devices 2 3     process 1
stages 0 1 2 3, rank_of_stage 0 1 1 0           stage 2 to stage 3 is a hop, stage 1 to stage 2 is none
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding

from jaxpar.pp._relayout import relaid, reshaped
from jaxpar.pp._transport._protocol import Arrival, Hop, Leaves, Transport


@dataclass(frozen=True, eq=False)
class Ranks:
    """Args:
    meshes: the devices of each rank.
    of_stage: which rank each stage lies on.
    transport: moves arrays between ranks.
    """

    meshes: tuple[Mesh, ...]
    of_stage: tuple[int, ...]
    transport: Transport

    @functools.cached_property
    def is_spread(self) -> bool:
        """Whether they lie on several processes."""
        return is_spread(self.meshes)

    @property
    def last(self) -> int:
        """The rank of the last stage."""
        return self.of_stage[-1]

    def mesh_of(self, stage: int) -> Mesh:
        """The devices of a stage."""
        return self.meshes[self.of_stage[stage]]

    @functools.cached_property
    def here(self) -> frozenset[int]:
        """The ranks of which this process has devices."""
        return frozenset(rank for rank, mesh in enumerate(self.meshes) if is_here(mesh))

    @functools.cached_property
    def stages_here(self) -> frozenset[int]:
        """The stages that this process runs, alone or with others."""
        return frozenset(stage for stage, rank in enumerate(self.of_stage) if rank in self.here)

    def move(
        self,
        values: Leaves | None,
        source: int,
        target: int,
        wanted: Sequence[jax.ShapeDtypeStruct],
        what: str,
    ) -> Arrival | None:
        """Moves arrays from one rank to another; every process calls it, in the same order.

        Args:
            values: the arrays; None in a process that has no device of the source.
            source: the rank that has them.
            target: the rank that wants them.
            wanted: shape, dtype and sharding of each at the target.
            what: they are, for messages.

        Returns:
            A function that gives them; None in a process that has no device of the target.
        """
        if source == target:
            return None if values is None else lambda: _laid_out(values, wanted)
        if not {source, target} & self.here:
            return None
        if not wanted:
            return list if target in self.here else None
        move = self.transport.move if self._are_alike(source, target) else self._move_anew
        arrival = move(values, Hop(source, target, what), wanted)
        return arrival if target in self.here else None

    def _are_alike(self, source: int, target: int) -> bool:
        """Whether two ranks have one shape, so that each device has what another one wants."""
        return self.meshes[source].shape == self.meshes[target].shape

    def _move_anew(self, values: Leaves | None, hop: Hop, wanted: Sequence[jax.ShapeDtypeStruct]) -> Arrival:
        """Lays arrays out anew and moves them device by device; first what makes less to move."""
        source, target = self.meshes[hop.source], self.meshes[hop.target]
        as_target = [_on(reshaped(source, target), w) for w in wanted]
        as_source = [_on(reshaped(target, source), w) for w in wanted]
        if _num_bytes(as_target) <= _num_bytes(as_source):
            return self.transport.move(values and _laid_anew(values, as_target), hop, wanted)
        arrival = self.transport.move(values, hop, as_source)
        return lambda: _laid_anew(arrival(), wanted)


def is_here(mesh: Mesh) -> bool:
    """Whether this process has devices of a mesh."""
    return any(device.process_index == jax.process_index() for device in mesh.devices.flat)


def is_spread(meshes: Sequence[Mesh]) -> bool:
    """Whether their devices belong to several processes."""
    return len({device.process_index for mesh in meshes for device in mesh.devices.flat}) > 1


def elsewhere(x: jax.Array) -> jax.Array:
    """Another array like `x`, of which this process has no part: it stands for a new value on other processes."""
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype)


def wanted(x: jax.Array | jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, on other devices."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _laid_out(values: Leaves, wanted: Sequence[jax.ShapeDtypeStruct]) -> Leaves:
    """On the same devices, described as wanted."""
    return [
        x if x.sharding == w.sharding else jax.device_put(x, w.sharding)
        for x, w in zip(values, wanted, strict=True)
    ]


def _laid_anew(values: Leaves, wanted: Sequence[jax.ShapeDtypeStruct]) -> Leaves:
    return relaid(values, [w.sharding for w in wanted])  # pyright: ignore[reportArgumentType]


def _on(mesh: Mesh, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same array on another mesh."""
    assert isinstance(like.sharding, NamedSharding)
    return wanted(like, NamedSharding(mesh, like.sharding.spec))


def _num_bytes(types: Sequence[jax.ShapeDtypeStruct]) -> int:
    """What one device has of arrays."""
    return sum(math.prod(t.sharding.shard_shape(t.shape)) * t.dtype.itemsize for t in types if t.sharding)
