"""`DistributedDataParallel`: the model keeps its parameters on every device; gradients are summed in buckets.

model            the same object, its class swapped: in a training step (manual axes) its parameters are marked,
                 and the backward sums their gradients over the mesh; anywhere else it is the plain model
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import jax
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._module import ModuleT, manual_axes, swap_class, varying_axes
from jaxpar.ddp._buckets import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES
from jaxpar.ddp._hooks import StatefulHook, allreduce_hook
from jaxpar.ddp._reduce import Hook, Reduction, reduce_in_backward
from jaxpar.mesh import MeshLike, as_jax_mesh, axes_of
from jaxpar.mesh._flat_buffers import default_flatten_below_bytes
from jaxpar.mesh._place import place

CONFIG = "_jaxpar_ddp"
BufferSync = Literal["broadcast", "mean"]


@dataclass(frozen=True)
class DDPConfig:
    """What `DistributedDataParallel` was asked for; an attribute of the model's class.

    Args:
        axes: mesh axes over which parameters are replicated and gradients summed.
        reduction: bucket sizes, hook, flat buffers.
        sync_buffers: whose buffers count when ranks differ.
    """

    axes: tuple[str, ...]
    reduction: Reduction = field(default_factory=Reduction)
    sync_buffers: BufferSync = "broadcast"


def DistributedDataParallel(
    model: ModuleT,
    mesh: MeshLike,
    *,
    bucket_bytes: int | Sequence[int] = DEFAULT_BUCKET_BYTES,
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES,
    comm_hook: Hook = allreduce_hook,
    sync_buffers: BufferSync = "broadcast",
    flatten_below_bytes: int | None = None,
) -> ModuleT:
    """Replicates a model over a mesh and sums its gradients in buckets, inside the backward pass.

    Forward: nothing moves. Backward: one all-reduce over the mesh's axes per bucket, each issued when the last of
    its gradients is ready, so it travels while earlier layers are still computing. At wrapping, parameters and
    buffers become those of process 0. Buffers that a step makes differ between ranks (BatchNorm statistics of
    local batches) are made equal after it; use `convert_sync_batchnorm` for statistics of the global batch.

    A parameter that the loss does not use gets a zero gradient (on all ranks, in every step); wrap the optimizer in
    `optax.masked` where weight decay must leave it alone. `nnx.Dropout` inside draws its masks by position in the
    global batch, so a run on n devices equals the run on one.

    Args:
        model: a Flax NNX module, concrete or abstract (`nnx.eval_shape`). Changed in place.
        mesh: the axes to replicate over, such as `mesh["dp"]`.
        bucket_bytes: a bucket is closed once it holds this much; a sequence gives the size of each bucket in turn
            (row P4), and `first_bucket_bytes` then has no meaning.
        first_bucket_bytes: the same for the first bucket, whose gradients are ready first.
        comm_hook: what goes over the wire (`jaxpar.ddp.bf16_compress_hook`, `PowerSGD(...)`).
        sync_buffers: what such buffers become: rank 0's (`"broadcast"`, as PyTorch's `forward_sync_buffers`, row P9) or
            their `"mean"`. They travel with the loss; there is no third way, since a replicated array is one array.
        flatten_below_bytes: gradients of a bucket that are smaller than this share one flat buffer. Default: all of
            them, except between CPU devices of one process, where copies of large ones cost more.

    Returns:
        `model`, the same object.

    Raises:
        ParallelizeError: nothing to train, wrapped twice, a bucket size that is not positive, or a hook that is none.

    Source: `torch.nn.parallel.DistributedDataParallel`, rows P1-P4, P9, P16-P18. Of its options, JAX makes these
    void: `find_unused_parameters`, `static_graph` (the traced program tells), `gradient_as_bucket_view`,
    `no_sync` (write `TrainStep(accumulate=n)`).

    Example:
        >>> from flax import nnx
        >>> from jaxpar.ddp import DistributedDataParallel
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((8,), ("dp",))
        >>> model = DistributedDataParallel(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), mesh)
        >>> len(model.kernel.sharding.device_set)
        8
    """
    if hasattr(type(model), CONFIG):
        raise ParallelizeError(
            f"{type(model).__name__} is wrapped in DistributedDataParallel already; gradients would be summed twice. "
            f"Call it once, on the whole model."
        )
    if sync_buffers not in get_args(BufferSync):
        raise ParallelizeError(
            f"sync_buffers={sync_buffers!r} is neither 'broadcast' (rank 0's buffers) nor 'mean'. Buffers of a replicated "
            f"model cannot stay different: drop the argument, or write sync_buffers='mean'."
        )
    if not nnx.to_flat_state(nnx.state(model, nnx.Param)):
        raise ParallelizeError(
            f"{type(model).__name__} has no nnx.Param: there is no gradient to average. Wrap the module that holds the "
            f"parameters, or declare them as nnx.Param(...)."
        )
    reduction = Reduction(
        bucket_bytes=bucket_bytes if isinstance(bucket_bytes, int) else tuple(bucket_bytes),
        first_bucket_bytes=first_bucket_bytes,
        comm_hook=comm_hook,
        flatten_below_bytes=default_flatten_below_bytes(mesh)
        if flatten_below_bytes is None
        else flatten_below_bytes,
    )
    put_on_mesh(model, mesh)
    return swap_class(model, "DDP", _call, {CONFIG: DDPConfig(axes_of(mesh), reduction, sync_buffers)})


def put_on_mesh(module: nnx.Pytree, mesh: MeshLike) -> None:
    """Gives every variable that does not lie on the mesh yet a place on it, in place (see `mesh/_place.py`)."""
    variables = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)]
    placed = place([variable.get_value() for variable in variables], as_jax_mesh(mesh))
    for variable, value in zip(variables, placed, strict=True):
        variable.set_value(value)


def _call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Marks the parameters for reduction where the axes are manual and nobody (a `TrainStep`) has done it yet."""
    config: DDPConfig = getattr(type(self), CONFIG)
    params = [v for _, v in nnx.iter_graph(self) if isinstance(v, nnx.Param)]
    plain = [v.get_value() for v in params]
    manual = [a for a in config.axes if a in manual_axes() and jax.lax.axis_size(a) > 1]
    axes = [tuple(a for a in manual if a not in varying_axes(x)) for x in plain]
    if not any(axes):
        return original(*args, **kwargs)
    if isinstance(config.reduction.comm_hook, StatefulHook):
        raise ParallelizeError(
            f"{type(config.reduction.comm_hook).__name__} keeps state from step to step, which only jaxpar.TrainStep "
            f"stores. Train with TrainStep, or use a stateless hook in your own shard_map."
        )
    buckets = config.reduction.buckets(plain, axes)
    marked, _ = reduce_in_backward(plain, config.reduction, buckets, [()] * len(plain))
    try:
        _assign(params, marked)
        return original(*args, **kwargs)
    finally:
        _assign(params, plain)


def _assign(variables: list[Any], values: list[jax.Array]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.set_value(value)
