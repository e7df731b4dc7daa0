"""The mesh axis that a sequence is split over: its size and this device's rank, where it has any.

inside shard_map, axis manual      c ranks, each with T/c rows
axis of size 1, or not manual      1 rank with all T rows: nothing is split, nothing moves
inside shard_map, axis unknown     ParallelizeError
"""

import difflib

import jax
from jax import lax

from jaxpar._errors import ParallelizeError


def num_ranks(where: str, axis: str) -> int:
    """Devices that share one sequence; 1 where the axis is not manual.

    Raises:
        ParallelizeError: The code runs in a `shard_map` whose mesh has no such axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis in mesh.manual_axes:
        return mesh.shape[axis]
    if mesh.manual_axes and axis not in mesh.axis_names:
        near = difflib.get_close_matches(str(axis), mesh.axis_names, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ParallelizeError(
            f"{where}: axis {axis!r} is not in the mesh of this shard_map, whose axes are {mesh.axis_names}. A "
            f"sequence is split over one axis of the mesh.{hint}"
        )
    return 1


def rank_on(axis: str, size: int) -> jax.Array | int:
    """This device's position on the axis; 0 on an axis of one rank."""
    return lax.axis_index(axis) if size > 1 else 0
