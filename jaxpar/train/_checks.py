"""What must be true of a model before it is trained: its units fit the batch, its arrays fit their records.

batch_axes ("dp",)    unit shards over dp     ok: each rank adds the gradient of its own rows
                      unit shards over tp     wrong: ranks of tp saw the same rows, and their sum counts them twice
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from jaxpar._errors import ParallelizeError
from jaxpar._record import Record, record_of
from jaxpar._spec import entries
from jaxpar.ddp._hooks import allreduce_hook
from jaxpar.ddp._reduce import Reduction
from jaxpar.fsdp._unit import unit_of
from jaxpar.fsdp._zero1 import Cut
from jaxpar.pp import PipelinePlan
from jaxpar.pp._stage import Stage
from jaxpar.train._parts import Parts


def check_units(model: nnx.Module, batch_axes: tuple[str, ...]) -> None:
    """Refuses units whose mesh axes do not split the batch.

    Raises:
        ParallelizeError: a unit shards or replicates over an axis that is not among `batch_axes`.
    """
    for path, module in nnx.iter_modules(model):
        unit = unit_of(module)
        if unit is None:
            continue
        axes = (*unit.replicate_axes, *unit.shard_axes)
        outside = [axis for axis in axes if axis not in batch_axes]
        if outside:
            name = ".".join(map(str, path)) or "the model itself"
            raise ParallelizeError(
                f"TrainStep: {name} ({type(module).__name__}) was given to fully_shard over the axes {axes}, but "
                f"batch_axes={batch_axes} does not split the batch over {outside[0]!r}. Its gradients are summed over those "
                f"axes, and ranks along {outside[0]!r} would add the gradient of the same rows again. Write TrainStep(..., "
                f"batch_axes={(*batch_axes, *outside)}), or shard over the axes that split the batch."
            )


def check_plan(plan: PipelinePlan, mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> None:
    """Refuses a mesh that the plan of a pipelined model does not fit.

    Raises:
        ParallelizeError: the mesh lacks the plan's axis, has another size of it, or splits the batch over it.
    """
    if plan.axis not in mesh.axis_names:
        raise ParallelizeError(
            f"TrainStep: the model was given to pipeline over the axis {plan.axis!r}, but the mesh of this step has the axes "
            f"{mesh.axis_names}. Write TrainStep(..., mesh=mesh) with the mesh whose mesh[{plan.axis!r}] pipeline was given."
        )
    if mesh.shape[plan.axis] != plan.schedule.n_ranks:
        raise ParallelizeError(
            f"TrainStep: the model's schedule is for {plan.schedule.n_ranks} ranks, but mesh axis {plan.axis!r} has "
            f"{mesh.shape[plan.axis]}. Give pipeline and TrainStep the same mesh."
        )
    if plan.axis in axes:
        raise ParallelizeError(
            f"TrainStep: {plan.axis!r} is the pipeline's axis, and is named among the axes that split the batch ({axes}): every "
            f"stage sees the same rows. Write batch_axes={tuple(a for a in axes if a != plan.axis)}."
        )


def check_pipelined(parts: Parts, plan: PipelinePlan) -> None:
    """Refuses options that a pipelined step does not have.

    Raises:
        ParallelizeError: units with frozen parameters gathered once for all microbatches, ZeRO-1, a hook with state,
            parameters in host memory or split over the pipeline's axis; or what the executor lacks.
    """
    local = parts.local
    if plan.executor == "spmd":
        _check_one_program(parts, plan)
    num_params = len(parts.model.chosen)
    frozen = sorted(i for i in (local.units.leaves if local.units else ()) if i >= num_params)
    if frozen:
        raise ParallelizeError(
            f"TrainStep: accumulate_unsharded of a pipelined model gathers what is trained only, and a unit of fully_shard holds "
            f"{len(frozen)} frozen variables. Remove accumulate_unsharded, or write fully_shard(..., ignored_params=[...]) with the frozen ones."
        )
    if any(parts.cuts):
        raise ParallelizeError(
            "TrainStep: shard_optimizer_state (ZeRO-1) is not offered for a pipelined model; fully_shard is, and keeps the state "
            "sharded too. Remove shard_optimizer_state."
        )
    params, rest = parts.model.values()
    for name, x in zip(parts.model.chosen_names, params, strict=True):
        assert isinstance(x.sharding, NamedSharding), "put_on_mesh has been here"
        is_here = isinstance(x, jax.Array)  # else the devices may be those of a cluster that is not here
        if is_here and x.sharding.memory_kind not in (None, *_device_memory(parts.mesh)):
            raise ParallelizeError(
                f"TrainStep: {name} lies in host memory (CPUOffloadPolicy), which a pipelined model does not offer. Remove the policy."
            )
        if plan.axis in {axis for entry in entries(x.sharding.spec, x.ndim) for axis in entry}:
            raise ParallelizeError(
                f"TrainStep: {name} is sharded over {plan.axis!r}, the pipeline's axis; there each rank holds stages of its own. "
                f"Shard over another axis: fully_shard(model, mesh['dp'])."
            )
    if jax.tree.leaves(
        local.sums.reduction.init_states([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in params])
    ):
        raise ParallelizeError(
            "TrainStep: the communication hook of DistributedDataParallel keeps a state, which is not offered for a pipelined "
            "model. Take bf16_compress_hook, or none."
        )


def check_alike(larger: Sequence[Stage], smaller: Sequence[Stage]) -> None:
    """Refuses a loss that does another thing with one row less: sums of both kinds of microbatches would not fit.

    Raises:
        ParallelizeError: a stage uses other variables, or gives other metrics.
    """

    def facts(stage: Stage) -> list[Any]:
        code = stage.code
        return [
            code.params,
            code.others,
            code.results,
            stage.sum_types,
            stage.grad_types,
            stage.changed_types,
        ]

    for s, (one, other) in enumerate(zip(larger, smaller, strict=True)):
        if facts(one) != facts(other):
            raise ParallelizeError(
                f"TrainStep: stage {s} uses other variables, or gives metrics of other shapes, for the smaller of two sizes of "
                f"microbatches: the loss depends on the number of rows in another way than through its arrays. Give a batch whose "
                f"rows divide into {one.kinds.n_microbatches} microbatches on each rank."
            )


def _check_one_program(parts: Parts, plan: PipelinePlan) -> None:
    if parts.local.accumulate > 1:
        raise ParallelizeError(
            f"TrainStep: accumulate={parts.local.accumulate} runs a schedule several times before an update, which pipeline(executor="
            f'"spmd") does not offer. Write n_microbatches={plan.schedule.n_microbatches * parts.local.accumulate}: under 1F1B memory '
            f'does not grow with them. Or take executor="mpmd".'
        )
    if parts.local.units is not None:
        raise ParallelizeError(
            'TrainStep: accumulate_unsharded is not offered with pipeline(executor="spmd"), whose units gather in each microbatch. '
            'Remove accumulate_unsharded, or take executor="mpmd".'
        )


def _device_memory(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    return (mesh.devices.flat[0].default_memory().kind,)


def check_records(model: nnx.Module, mesh: jax.sharding.Mesh) -> None:
    """Refuses parameters that no longer lie where `fully_shard` put them.

    Raises:
        ParallelizeError: an array's sharding contradicts its variable's record.
    """
    for path, variable in nnx.iter_graph(model):
        record = record_of(variable) if isinstance(variable, nnx.Variable) else None
        if record is None:
            continue
        x = variable.get_value()
        wrong = _contradiction(x, record, mesh)
        if wrong:
            raise ParallelizeError(
                f"TrainStep: {'.'.join(map(str, path))}, {x.dtype}{list(x.shape)}, {wrong}. In the step its unit would "
                f"take this device's block for something that it is not. Keep the sharding when you assign: "
                f"variable[...] = jax.device_put(value, variable.sharding)."
            )


def check_cuts(
    names: Sequence[str], cuts: Sequence[Cut | None], batch_axes: tuple[str, ...], reduction: Reduction
) -> None:
    """Refuses sharded state of replicated parameters (ZeRO-1) that the gradients cannot follow.

    Raises:
        ParallelizeError: it is sharded over an axis that does not split the batch, or a communication hook of
            `DistributedDataParallel` would be bypassed.
    """
    for name, cut in zip(names, cuts, strict=True):
        if cut is None:
            continue
        outside = [axis for axis in cut.axes if axis not in batch_axes]
        if outside:
            raise ParallelizeError(
                f"TrainStep: the optimizer's state of {name} is sharded over {cut.axes}, its parameter is not, and "
                f"batch_axes={batch_axes} does not split the batch over {outside[0]!r}: gradients are not summed there, so they "
                f"cannot be reduce-scattered. Write shard_optimizer_state(optimizer, mesh[{batch_axes[0]!r}])."
            )
        if reduction.comm_hook is not allreduce_hook:
            hook = getattr(reduction.comm_hook, "__name__", type(reduction.comm_hook).__name__)
            raise ParallelizeError(
                f"TrainStep: DistributedDataParallel(comm_hook={hook}) says how gradients are all-reduced, but those of "
                f"{name} are reduce-scattered, because its optimizer state is sharded (shard_optimizer_state): the hook would "
                f"be bypassed. Remove the hook, or keep the state replicated."
            )


def _contradiction(x: Any, record: Record, mesh: jax.sharding.Mesh) -> str:
    """In words; empty if the array lies as recorded."""
    sharding, axes = getattr(x, "sharding", None), record.axes
    spec = sharding.spec if isinstance(sharding, NamedSharding) and sharding.mesh == mesh else None
    used = [] if spec is None else entries(spec, x.ndim)
    found = [dim for dim, names in enumerate(used) if set(names) & set(axes)]
    if record.dim is None:  # of an ignored parameter the user knows; what is elsewhere will be replicated
        is_fine = not found or record.reason == "ignored"
        return "" if is_fine else f"was kept whole by fully_shard, and now is sharded as {spec}"
    here = record.dim % x.ndim if x.ndim else 0
    if found == [here] and tuple(name for name in used[here] if name in axes) == axes:
        return ""
    was = f"was sharded along dim {here} over {axes} by fully_shard"
    if spec is not None:
        return f"{was}, and now is sharded as {spec}"
    return f"{was}, and now lies on {_place(sharding)}, while the mesh of this step is {dict(mesh.shape)}"


def _place(sharding: Any) -> str:
    if isinstance(sharding, NamedSharding):
        return f"another mesh, {dict(sharding.mesh.shape)}"
    return "no device" if sharding is None else f"{len(sharding.device_set)} device(s) of no mesh"
