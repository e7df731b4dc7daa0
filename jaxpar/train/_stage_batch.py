"""The batch on the devices of a stage: every stage that reads an array of the batch has its rows, split as without pipeline.

    mesh (pp 2, dp 2)      [8, ...]      rank 0 of pp: rows 0-3 | 4-7      rank 1 of pp: rows 0-3 | 4-7

With several processes each feeds the rows of its own devices, so those of one pipeline feed the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.data import global_batch
from jaxpar.data._global_batch import global_shapes
from jaxpar.pp._place import restricted


@dataclass(frozen=True, eq=False)
class StageBatch:
    """Args:
    mesh: of the whole job.
    axes: those that split the batch.
    """

    mesh: Mesh
    axes: tuple[str, ...]

    def shapes(self, leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Global shapes of what a process feeds."""
        if not self.mesh.is_multi_process:
            return [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
        return global_shapes(list(leaves), self.mesh, self.axes)

    def on(self, mesh: Mesh, x: Any) -> jax.Array:
        """An array of the batch on the devices of a stage."""
        sharding = NamedSharding(mesh, PartitionSpec(self.axes or None))
        if sharding.is_fully_addressable and not _is_spread(x):
            return jax.device_put(x, sharding)
        if isinstance(x, jax.Array) and x.sharding.device_set == set(self.mesh.devices.flat):
            return restricted(x, sharding)
        return global_batch(x, mesh, self.axes)


def _is_spread(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable
