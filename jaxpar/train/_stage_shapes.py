"""The loss traced for ranks of several shapes: each shape as if the job's mesh had it, every stage taken from its own rank's.

    rank 0 (dp 4, tp 1)    traced, cut     stage 0 <-     stage 1
    rank 1 (dp 2, tp 2)    traced, cut     stage 0        stage 1 <-

Parameters keep their specs. Rows are numbered, and dealt to microbatches, as the job's mesh has them, on every rank.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxpar._errors import ParallelizeError
from jaxpar._record import KEY, record_of
from jaxpar.pp._ranks import Ranks
from jaxpar.pp._relayout import Boundary, Side, live
from jaxpar.pp._stage import Stage
from jaxpar.train._stage_trace import LossTrace, Traced


def traces_of_ranks(trace: LossTrace, meshes: Sequence[Mesh]) -> tuple[LossTrace, ...]:
    """The trace of each rank; ranks of one shape share it.

    Args:
        trace: over a mesh with the sizes that the job's mesh has.
        meshes: of each rank.
    """
    of_shape = {mesh.devices.shape: _in_shape(trace, mesh) for mesh in reversed(meshes)}
    return tuple(of_shape[mesh.devices.shape] for mesh in meshes)


def _in_shape(trace: LossTrace, mesh: Mesh) -> LossTrace:
    """The trace of a step whose mesh has these sizes: axes of size 1 are left out."""

    def live_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if mesh.shape[axis] > 1)

    local, positions = trace.local, trace.local.positions
    of_job = num_ranks(trace.mesh, positions.rows)
    is_dealt_anew = num_ranks(mesh, positions.rows) != of_job
    return dataclasses.replace(
        trace,
        mesh=mesh,
        params=tuple(live(spec, mesh) for spec in trace.params),
        rest=tuple(live(spec, mesh) for spec in trace.rest),
        local=dataclasses.replace(
            local,
            sums=dataclasses.replace(local.sums, axes=tuple(map(live_axes, local.sums.axes))),
            rest_axes=tuple(map(live_axes, local.rest_axes)),
            axes=live_axes(local.axes),
            num_ranks=num_ranks(mesh, local.axes),
            positions=dataclasses.replace(
                positions,
                rows=live_axes(positions.rows),
                sequences=live_axes(positions.sequences),
                dealt_to=of_job if is_dealt_anew else 0,
            ),
        ),
    )


def num_ranks(mesh: Mesh, axes: Sequence[str]) -> int:
    """Product of the sizes of some axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def traced_by_rank(
    traces: Sequence[LossTrace],
    params: Sequence[Any],
    rest: Sequence[Any],
    batch: Sequence[jax.ShapeDtypeStruct],
    treedef: Any,
    *,
    is_smaller: bool,
) -> list[Traced]:
    """What each rank's trace gives, for a batch; one of several ranks is made once."""
    made = {
        trace: trace(params, rest, batch, treedef, is_smaller=is_smaller) for trace in dict.fromkeys(traces)
    }
    return [made[trace] for trace in traces]


def stages_of(traced: Sequence[Traced], ranks: Ranks, row_axes: tuple[str, ...]) -> tuple[Stage, ...]:
    """The programs of every stage, of the trace of its rank.

    Args:
        traced: of each rank.
        ranks: where stages lie.
        row_axes: the axes that split the batch, on any rank.

    Raises:
        ParallelizeError: the loss is another one on ranks of another shape, or what crosses from one to another cannot be
            laid out there.
    """
    for rank, other in enumerate(traced):
        if other is not traced[0]:
            _check_one_cut(traced[0], other, ranks.meshes[0], ranks.meshes[rank])
    mine = [traced[rank] for rank in ranks.of_stage]
    lies = [None, *(_lies(mine, s, ranks, row_axes) for s in range(len(mine) - 1)), None]
    return tuple(
        Stage(some.codes[s], some.kinds, ranks.mesh_of(s), received_as=lies[s], sent_as=lies[s + 1])
        for s, some in enumerate(mine)
    )


def _lies(
    traced: Sequence[Traced], s: int, ranks: Ranks, row_axes: tuple[str, ...]
) -> tuple[PartitionSpec, ...] | None:
    """How what stage `s` sends lies between programs; None where the next one has the same shape."""
    if ranks.mesh_of(s).shape == ranks.mesh_of(s + 1).shape:
        return None
    source, target = (Side(ranks.mesh_of(i), traced[i].rows) for i in (s, s + 1))
    boundary = Boundary(source, target, row_axes, f"from stage {s} to stage {s + 1}")
    return tuple(map(boundary.spec, traced[s].codes[s].sent, traced[s + 1].codes[s + 1].received))


def _check_one_cut(one: Traced, other: Traced, mesh: Mesh, other_mesh: Mesh) -> None:
    """Refuses a loss that does another thing on a mesh of another shape."""
    for s, codes in enumerate(zip(one.codes, other.codes, strict=True)):
        facts = [(c.params, c.others, c.results, [t.dtype for t in (*c.received, *c.sent)]) for c in codes]
        if facts[0] != facts[1] or one.means != other.means:
            raise ParallelizeError(
                f"pipeline: stage {s} uses other variables, or passes on other values, on a mesh of {dict(mesh.shape)} than on one "
                f"of {dict(other_mesh.shape)}: the model or the loss asks for the size of an axis. Give all ranks the same "
                f"shape, or let it do the same for every size."
            )


def fit_records(model: nnx.Module) -> None:
    """Lets every record of `fully_shard` tell a part from the whole on this mesh; inside `jax.shard_map`, in place.

    A dim that tensor parallelism splits too is, gathered, as long as one of its parts: another length for another size.
    """
    for _, variable in nnx.iter_graph(model):
        record = record_of(variable) if isinstance(variable, nnx.Variable) else None
        if record is not None and record.dim is not None and record.shape is None:
            size = variable.get_value().shape[record.dim] * math.prod(map(jax.lax.axis_size, record.axes))
            variable.set_metadata(KEY, dataclasses.replace(record, size=size))
