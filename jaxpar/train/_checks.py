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
