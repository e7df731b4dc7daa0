"""The shapes of a pipeline's ranks: as many devices in each, arranged otherwise over the other axes.

mesh (pp 2, dp 2, tp 2), shapes {0: {"dp": 4, "tp": 1}}

rank 0    devices 0 1 2 3    dp 4, tp 1        0 | 1 | 2 | 3
rank 1    devices 4 5 6 7    dp 2, tp 2        4 5 | 6 7

An array that P("tp") splits is whole on rank 0, and cut in two on rank 1.
"""

import math
from collections.abc import Mapping

from jax.sharding import Mesh

from jaxpar._errors import ParallelizeError
from jaxpar.pp._place import stage_mesh

Shapes = tuple[tuple[int, tuple[tuple[str, int], ...]], ...]


def checked_shapes(shapes: Mapping[int, Mapping[str, int]] | None, mesh: Mesh, axis: str) -> Shapes:
    """Shapes as a plan keeps them; those that the mesh has anyway are left out.

    Args:
        shapes: for some ranks the sizes of some axes.
        mesh: the whole one.
        axis: the pipeline's.

    Raises:
        ParallelizeError: there is no such rank or axis, or the sizes take another number of devices.
    """
    inner = {name: mesh.shape[name] for name in mesh.axis_names if name != axis}
    num_devices = math.prod(inner.values())
    found = []
    for rank, sizes in sorted((shapes or {}).items()):
        if not 0 <= rank < mesh.shape[axis]:
            raise ParallelizeError(
                f"pipeline: shapes names rank {rank}, but mesh axis {axis!r} has the ranks 0 to {mesh.shape[axis] - 1}."
            )
        unknown = [name for name in sizes if name not in inner]
        if unknown:
            raise ParallelizeError(
                f"pipeline: shapes[{rank}] names {unknown[0]!r}, but the devices of a rank lie along {tuple(inner)}. "
                f"Every rank has the same axes; only their sizes may differ."
            )
        whole = inner | dict(sizes)
        if min(whole.values(), default=1) < 1 or math.prod(whole.values()) != num_devices:
            product = " x ".join(f"{name} {size}" for name, size in whole.items())
            raise ParallelizeError(
                f"pipeline: shapes[{rank}] = {dict(sizes)} makes {product} = {math.prod(whole.values())} devices, but each rank of "
                f"{axis!r} has {num_devices} ({' x '.join(f'{name} {size}' for name, size in inner.items())}). Axes that are not "
                f"named keep their size."
            )
        if whole != inner:
            found.append((rank, tuple(whole.items())))
    return tuple(found)


def stage_meshes(mesh: Mesh, axis: str, shapes: Shapes = ()) -> tuple[Mesh, ...]:
    """The devices of each rank of a pipeline, in its shape."""
    sizes = dict(shapes)
    return tuple(stage_mesh(mesh, axis, rank, dict(sizes.get(rank, ()))) for rank in range(mesh.shape[axis]))


def largest_sizes(mesh: Mesh, axis: str, shapes: Shapes = ()) -> dict[str, int]:
    """The largest size that each axis of a mesh has on any rank."""
    inner = [name for name in mesh.axis_names if name != axis]
    meshes = stage_meshes(mesh, axis, shapes) if shapes else ()
    return dict(mesh.shape) | {
        name: max(mesh.shape[name], *(rank.shape[name] for rank in meshes)) for name in inner if meshes
    }
