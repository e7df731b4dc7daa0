"""Which mesh axes shard parameters and which replicate the shards.

mesh["dp"]                    shard over dp                          FSDP
mesh["replica", "shard"]      replicate over the first, shard over the second    HSDP
shard_axis=, replicate_axis=  by name, any mesh
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar._errors import ParallelizeError
from jaxpar.mesh import MeshLike, as_jax_mesh, axes_of


@dataclass(frozen=True)
class Axes:
    """The part that each mesh axis plays.

    Args:
        shard: over which parameters are sharded, the first varying slowest.
        replicate: over which the shards are replicated.
    """

    shard: tuple[str, ...]
    replicate: tuple[str, ...]


def resolve_axes(
    mesh: MeshLike, shard_axis: str | Sequence[str] | None, replicate_axis: str | Sequence[str] | None
) -> Axes:
    """Returns the parts that axes play: as named, else by the shape of the mesh (rows F2, F3).

    Raises:
        ParallelizeError: a name is unknown or named twice, or the mesh has more axes than can be guessed.
    """
    names = axes_of(mesh)
    shard, replicate = _as_tuple(shard_axis), _as_tuple(replicate_axis)
    unknown = [axis for axis in (*shard, *replicate) if axis not in names]
    if unknown:
        raise ParallelizeError(
            f"fully_shard: axis {unknown[0]!r} is not among the axes {names} of the mesh it was given. Name axes of that "
            f"mesh, or give it the whole mesh."
        )
    if len(set(shard + replicate)) != len(shard + replicate):
        raise ParallelizeError(
            f"fully_shard: an axis is named twice in shard_axis={shard}, replicate_axis={replicate}. Parameters are "
            f"sharded or replicated over an axis, not both."
        )
    if shard:
        return Axes(shard, replicate)
    left = tuple(axis for axis in names if axis not in replicate)
    if len(left) == 1:
        return Axes(left, replicate)
    if len(left) == 2 and not replicate:
        return Axes(left[1:], left[:1])
    raise ParallelizeError(
        f"fully_shard: the mesh has the axes {names}; which of them shard parameters? One axis means FSDP, two mean HSDP "
        f"(replicate over the first, shard over the second). Write fully_shard(model, mesh[{names[-1]!r}]), or "
        f"shard_axis={names[-1]!r}, replicate_axis={names[0]!r}."
    )


def resolve_reshard(
    mesh: MeshLike, axes: Axes, reshard_after_forward: bool | int | None
) -> bool | None | tuple[str, ...]:
    """Returns True, False, None, or for a number k the inner shard axes that have k ranks (row F4).

    Raises:
        ParallelizeError: no inner axes have k ranks.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    sizes = [as_jax_mesh(mesh).shape[axis] for axis in axes.shard]
    if reshard_after_forward == math.prod(sizes):
        return True
    if reshard_after_forward == 1:
        return False
    for first in range(1, len(sizes)):
        if math.prod(sizes[first:]) == reshard_after_forward:
            return axes.shard[first:]
    raise ParallelizeError(_no_such_split(axes, sizes, reshard_after_forward))


def _no_such_split(axes: Axes, sizes: list[int], k: int) -> str:
    have = " x ".join(f"{axis}={size}" for axis, size in zip(axes.shard, sizes, strict=True))
    total = math.prod(sizes)
    if k < 1 or total % k:
        divisors = [d for d in range(1, total + 1) if total % d == 0]
        return (
            f"fully_shard: reshard_after_forward={k} does not divide the {total} ranks that shard parameters ({have}). "
            f"Between forward and backward, groups of k ranks hold a copy together; write one of {divisors}."
        )
    axis = axes.shard[0]
    return (
        f"fully_shard: reshard_after_forward={k} keeps parameters sharded over {k} ranks, so inner shard axes must have "
        f"{k} ranks together; there are {have}. Split the axis: init_device_mesh(({total // k}, {k}), ('{axis}_outer', "
        f"'{axis}_inner')) and shard_axis=('{axis}_outer', '{axis}_inner')."
    )


def _as_tuple(names: str | Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)
