"""What must be true of a model whose pipeline's ranks have shapes of their own.

arrays        divide by the sizes of every rank             f32[6] as P("fsdp") on fsdp 4: refused
tp            the mesh's size is a multiple of each rank's     heads stay whole
sequences     are split over as many ranks everywhere       their parts are not in one piece (load balance)
rows          divide by ranks x microbatches everywhere     a microbatch is the same rows on every rank
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxpar._errors import BatchError, ParallelizeError
from jaxpar._spec import entries
from jaxpar.pp import PipelinePlan
from jaxpar.pp._ranks import is_spread
from jaxpar.pp._shapes import checked_shapes, stage_meshes
from jaxpar.tp._style import style_of


def check_shapes(
    model: nnx.Module,
    optimizer: nnx.Pytree,
    plan: PipelinePlan,
    mesh: Mesh,
    sequence_axes: Sequence[str],
    *,
    is_unsharded: bool,
) -> None:
    """Refuses what ranks of other shapes cannot have; nothing to do without such.

    Raises:
        ParallelizeError: stages on several processes, sequences split over another number of ranks, units gathered once for
            all microbatches, or a part of the model that does not divide.
    """
    if not plan.shapes:
        return
    checked_shapes({rank: dict(sizes) for rank, sizes in plan.shapes}, mesh, plan.axis)
    meshes = stage_meshes(mesh, plan.axis, plan.shapes)
    if is_spread(meshes):
        raise ParallelizeError(
            "TrainStep: pipeline(shapes=...) is for stages of one process: over several, each feeds the rows of its own devices, "
            "and on ranks of another shape those would be others. Leave shapes out."
        )
    if is_unsharded:
        raise ParallelizeError(
            "TrainStep: accumulate_unsharded is not offered with pipeline(shapes=...), where units gather in each microbatch. "
            "Remove accumulate_unsharded, or shapes."
        )
    for rank, of_rank in enumerate(meshes):
        for axis in sequence_axes:
            if of_rank.shape[axis] != mesh.shape[axis]:
                raise ParallelizeError(
                    f"TrainStep: pipeline(shapes=...) gives rank {rank} {axis}={of_rank.shape[axis]}, but the mesh has {axis}="
                    f"{mesh.shape[axis]}, and {axis!r} splits sequences (sequence_axes), of which ranks have parts that are not "
                    f"in one piece. Keep its size on all ranks."
                )
        _check_styles(model, rank, of_rank, mesh)
        for module in (model, optimizer):
            _check_arrays(module, rank, of_rank)


def _check_styles(model: nnx.Module, rank: int, of_rank: Mesh, mesh: Mesh) -> None:
    for path, module in nnx.iter_modules(model):
        style: Any = style_of(module)
        axis = None if style is None else style.axis
        if axis is None or of_rank.shape[axis] == 1:
            continue
        size, heads = of_rank.shape[axis], getattr(style, "heads", None)
        what = f"TrainStep: pipeline(shapes=...) gives rank {rank} {axis}={size}, but {'.'.join(map(str, path))} ({type(style).__name__})"
        if mesh.shape[axis] % size:
            raise ParallelizeError(
                f"{what} was split for {axis}={mesh.shape[axis]}, and heads are sure to stay whole only on a part of those ranks: "
                f"{mesh.shape[axis]} % {size} = {mesh.shape[axis] % size}. Build the mesh with {axis}={math.lcm(size, mesh.shape[axis])}, and "
                f"give the other ranks the smaller size."
            )
        if heads is not None and size % heads:
            raise ParallelizeError(
                f"{what} has {heads} heads, replicated for {axis}={mesh.shape[axis]}: each rank computes one, and {size} ranks "
                f"cannot share them out ({size} % {heads} = {size % heads}). Take {axis}=1 or a multiple of {heads}."
            )


def _check_arrays(module: nnx.Pytree, rank: int, of_rank: Mesh) -> None:
    for path, variable in nnx.iter_graph(module):
        x = variable.get_value() if isinstance(variable, nnx.Variable) else None
        sharding: Any = getattr(x, "sharding", None)
        if x is None or sharding is None:
            continue
        for dim, names in enumerate(entries(sharding.spec, x.ndim)):
            parts = math.prod(of_rank.shape[axis] for axis in names)
            if x.shape[dim] % parts:
                raise ParallelizeError(
                    f"TrainStep: dim {dim} of {'.'.join(map(str, path))}, {x.dtype}{list(x.shape)}, is sharded over {names}, and does "
                    f"not divide on rank {rank} of the pipeline, where pipeline(shapes=...) makes {dict(of_rank.shape)}: "
                    f"{x.shape[dim]} % {parts} = {x.shape[dim] % parts}. Give that rank sizes that divide it, or keep the "
                    f"parameter whole (ignored_params of fully_shard)."
                )


def check_rows_of_ranks(
    batch: Sequence[jax.ShapeDtypeStruct], nums: Sequence[int], num_microbatches: int
) -> None:
    """Refuses rows that not every rank can deal to its devices in equal microbatches, if ranks have not as many.

    Args:
        batch: global shapes.
        nums: over how many devices each rank of the pipeline splits the batch.
        num_microbatches: of a step.

    Raises:
        BatchError: they do not divide.
    """
    if len(set(nums)) == 1:
        return
    for size in sorted({x.shape[0] for x in batch}):
        rank = next((rank for rank, num in enumerate(nums) if size % (num * num_microbatches)), None)
        if rank is not None:
            parts = nums[rank] * num_microbatches
            raise BatchError(
                f"a batch of {size} rows does not divide on rank {rank} of the pipeline, which by pipeline(shapes=...) splits it over "
                f"{nums[rank]} devices x {num_microbatches} microbatches: {size} % {parts} = {size % parts}. Where ranks split the "
                f"batch over different numbers of devices ({list(nums)}), microbatches must be equal. Pad it to "
                f"{-(-size // math.lcm(*nums) // num_microbatches) * math.lcm(*nums) * num_microbatches} rows with jaxpar.data.pad_batch."
            )
