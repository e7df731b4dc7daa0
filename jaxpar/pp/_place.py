"""Where the arrays of a pipelined model lie: on the whole mesh before its first step, on the devices of their stage after.

mesh (pp 2, dp 2)      f32[8@dp]      on all four devices, copies along pp
stage 1                f32[8@dp]      on the two devices of rank 1
"""

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.mesh._mesh import auto_mesh


def stage_mesh(mesh: Mesh, axis: str, rank: int) -> Mesh:
    """The devices of one rank of the pipeline, with the other axes of the mesh (one of size 1 if there are none)."""
    names = tuple(name for name in mesh.axis_names if name != axis)
    devices = np.take(mesh.devices, [rank], axis=mesh.axis_names.index(axis))
    return auto_mesh(devices.reshape([mesh.shape[name] for name in names] or [1]), names or ("stage",))


def spec_on_stage(x: Any, axis: str) -> PartitionSpec:
    """How an array lies over the axes of a stage; those of size 1 left out."""

    def live(entry: Any) -> Any:
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        return tuple(name for name in names if name != axis and x.sharding.mesh.shape[name] > 1) or None

    return PartitionSpec(*map(live, x.sharding.spec))


def onto_whole_mesh(module: nnx.Pytree, mesh: Mesh, axis: str) -> None:
    """Put back, in place, what an earlier step moved to the devices of stages."""
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Variable):
            variable.set_value(on_whole_mesh(variable.get_value(), mesh, axis))


def on_whole_mesh(x: Any, mesh: Mesh, axis: str) -> Any:
    """An array of one stage on all devices, copies along `axis`; anything else as it is."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh == mesh:
        return x
    stages = [stage_mesh(mesh, axis, rank) for rank in range(mesh.shape[axis])]
    return jax.device_put(x, NamedSharding(mesh, sharding.spec)) if sharding.mesh in stages else x


class Copies:
    """Copies of arrays on the devices of other stages, made again only when the value is another one.

    Args:
        meshes: of each stage.
    """

    def __init__(self, meshes: tuple[Mesh, ...]) -> None:
        self._meshes = meshes
        self._known: dict[tuple[int, Hashable], tuple[Any, Any]] = {}

    def on(self, stage: int, name: Hashable, x: Any, spec: PartitionSpec) -> Any:
        """`x` on the devices of a stage; itself, if it lies there."""
        sharding = NamedSharding(self._meshes[stage], spec)
        if x.sharding == sharding:
            return x
        known = self._known.get((stage, name))
        if known is None or known[0] is not x:
            known = self._known[stage, name] = (x, jax.device_put(x, sharding))
        return known[1]
