"""The stages of a step for the executor that runs a schedule as one program: traced over the whole mesh.

over the mesh of a stage    f32[...] that varies over {dp}          a program per action
over the whole mesh         f32[...] that varies over {dp, pp}      one program: every rank holds another stage's
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar._errors import BatchError
from jaxpar.pp._spmd._abstract import abstract_arrays
from jaxpar.pp._spmd._run import OneProgram
from jaxpar.pp._stage import Stage
from jaxpar.train._stage_trace import LossTrace


def one_program(
    trace: LossTrace,
    meshes: Sequence[Mesh],
    mesh: Mesh,
    axis: str,
    params: Sequence[Any],
    rest: Sequence[Any],
    batch: Sequence[jax.ShapeDtypeStruct],
    treedef: Any,
) -> OneProgram:
    """The executor for one shape of the batch.

    Args:
        trace: of the loss, over the mesh of a stage.
        meshes: of each stage: there lies what it works on.
        mesh: the whole one.
        axis: the pipeline's.
        params: parameters, or their shapes.
        rest: other variables, or their shapes.
        batch: its global shapes.
        treedef: its structure.
    """
    positions = dataclasses.replace(trace.local.positions, stages=(axis,))
    local = dataclasses.replace(trace.local, positions=positions)
    traced = dataclasses.replace(trace, local=local, mesh=mesh, axis=axis)(params, rest, batch, treedef)
    return OneProgram(
        mesh=mesh,
        axis=axis,
        stages=tuple(Stage(code, traced.kinds, mesh) for code in traced.codes),
        arrays=tuple(
            abstract_arrays(Stage(code, traced.kinds, stage_mesh), params, rest, batch)
            for code, stage_mesh in zip(traced.codes, meshes, strict=True)
        ),
    )


def refuse_unequal(num_rows: int, num_microbatches: int, num_ranks: int) -> None:
    """Refuses microbatches of two sizes, which would need two programs for every action of the loop.

    Raises:
        BatchError: the rows of a rank do not divide into its microbatches.
    """
    if num_rows % num_microbatches:
        total, size = num_rows * num_ranks, num_microbatches * num_ranks
        raise BatchError(
            f'TrainStep: pipeline(executor="spmd") takes equal microbatches, but a batch of {total} rows does not divide into '
            f"{num_ranks} ranks x {num_microbatches} microbatches: {total} % {size} = {total % size}. Pad it with batch, mask = "
            f"jaxpar.data.pad_batch(batch, {-(-total // size) * size}) and return jaxpar.Mean((losses * mask).sum(), mask.sum()), "
            f'or take executor="mpmd".'
        )
