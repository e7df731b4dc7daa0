"""The batch on the devices of a stage: every stage that reads an array of the batch has its rows, split as without pipeline.

    mesh (pp 2, dp 2)      [8, ...]      rank 0 of pp: rows 0-3 | 4-7      rank 1 of pp: rows 0-3 | 4-7

With several processes each feeds the rows of its own devices, so those of one pipeline feed the same rows.

A rank that splits the batch over another number of devices is given rows in another order, so that a microbatch is the same
rows everywhere: those that it is on ranks with the mesh's sizes.

    mesh dp 2, 2 microbatches      0 1 | 2 3      microbatch 0 is rows 0 and 2
    a rank with dp 1               0 2   1 3
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.data import global_batch
from jaxpar.data._global_batch import global_shapes
from jaxpar.pp._place import restricted


@dataclass(frozen=True, eq=False)
class StageBatch:
    """Args:
    mesh: of the whole job.
    axes: those that split the batch.
    n_microbatches: in how many parts each device takes its rows.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    n_microbatches: int

    def shapes(self, leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Global shapes of what a process feeds."""
        if not self.mesh.is_multi_process:
            return [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
        return global_shapes(list(leaves), self.mesh, self.axes)

    def on(self, mesh: Mesh, x: Any) -> jax.Array:
        """An array of the batch on the devices of a stage."""
        x = self._dealt_anew(mesh, x)
        sharding = NamedSharding(mesh, PartitionSpec(self.axes or None))
        if sharding.is_fully_addressable and not _is_spread(x):
            return jax.device_put(x, sharding)
        if isinstance(x, jax.Array) and x.sharding.device_set == set(self.mesh.devices.flat):
            return restricted(x, sharding)
        return global_batch(x, mesh, self.axes)

    def _dealt_anew(self, mesh: Mesh, x: Any) -> Any:
        """The rows, [ranks, microbatches, rows], in the order for another number of ranks."""
        here, there = (math.prod(m.shape[axis] for axis in self.axes) for m in (self.mesh, mesh))
        if here == there:
            return x
        x = x if isinstance(x, jax.Array) else np.asarray(x)
        by_part = x.reshape(here, self.n_microbatches, -1, *x.shape[1:]).swapaxes(0, 1)
        by_rank = by_part.reshape(self.n_microbatches, there, -1, *x.shape[1:]).swapaxes(0, 1)
        return by_rank.reshape(x.shape)


def _is_spread(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable
