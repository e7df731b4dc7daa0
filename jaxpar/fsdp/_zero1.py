"""`shard_optimizer_state`: ZeRO-1: parameters stay on every device, the optimizer's state is cut 1/n per device.

    gradients    device r: of the whole batch, slice r           reduce-scatter in place of DDP's all-reduce
    update       device r: slice r of state and parameters
    parameters   every device: whole                             all-gather of the updated slices

The state's own sharding is the record: state that is sharded while its parameter is replicated means ZeRO-1.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar._errors import ParallelizeError
from jaxpar._named import dotted
from jaxpar._record import KEY, Record
from jaxpar._spec import as_spec, entries
from jaxpar.fsdp._dims import Leaf, choose_dim
from jaxpar.mesh import MeshLike, as_jax_mesh, axes_of
from jaxpar.mesh._place import put

OptimizerT = TypeVar("OptimizerT", bound=nnx.Optimizer)


def shard_optimizer_state(optimizer: OptimizerT, mesh: MeshLike) -> OptimizerT:
    """Shards the state of an optimizer over a mesh axis, for a model whose parameters stay replicated (ZeRO-1).

    Per step of `TrainStep`, of each parameter whose state is sharded:

        backward    a reduce-scatter of the gradients in place of the all-reduce, bucket by bucket as in
                    `DistributedDataParallel`, where they are ready
        update      one all-gather of the updated parameters, in the same buckets

    Together they move as much as the all-reduce did; each device keeps and updates 1/n of the state.

    Each array of the state that belongs to a parameter is cut along dim 0 if it divides, else along the largest dim
    that divides, beside the axes that it is sharded over already; what does not divide stays replicated and is
    listed, with its reason, by `sharding_report(optimizer)`.

    Args:
        optimizer: built for a plain model, or one in `DistributedDataParallel`, concrete or abstract. Changed in place.
        mesh: the axes to shard over, such as `mesh["dp"]`; they must split the batch.

    Returns:
        `optimizer`, the same object.

    Raises:
        ParallelizeError: the state is sharded already (as that of a model in `fully_shard` is), or there is none.

    Source: ZeRO (arXiv 1910.02054), PyTorch's `ZeroRedundancyOptimizer` (row O2).

    Example:
        >>> import jaxpar, optax
        >>> from flax import nnx
        >>> from jaxpar.fsdp import shard_optimizer_state
        >>> model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> optimizer = shard_optimizer_state(optimizer, jaxpar.init_device_mesh((8,), ("dp",)))
        >>> optimizer.opt_state[0].mu.kernel.sharding.shard_shape((16, 4))
        (2, 4)
    """
    axes, whole = axes_of(mesh), as_jax_mesh(mesh)
    state = [
        (dotted(path), node) for path, node in nnx.iter_graph(optimizer) if isinstance(node, nnx.OptVariable)
    ]
    if not state:
        raise ParallelizeError(
            "shard_optimizer_state: the optimizer keeps no array per parameter (such as Adam's mu and nu), so there is "
            "nothing to shard. Remove the call: DistributedDataParallel alone does the same."
        )
    before = [_lies(variable.get_value(), whole) for _, variable in state]
    for (name, _), sharding in zip(state, before, strict=True):
        _check_not_sharded(name, sharding.spec, axes)
    for (name, variable), sharding in zip(state, before, strict=True):
        _shard(name, variable, sharding, axes)
    return optimizer


def _shard(
    name: str,
    variable: nnx.Variable[Any],
    before: NamedSharding,
    axes: tuple[str, ...],
) -> None:
    x, spec, mesh = variable.get_value(), before.spec, before.mesh
    num_parts = math.prod(mesh.shape[axis] for axis in axes)
    # The update works on parameters and state of one shape, so nothing is stored flat.
    choice = choose_dim(
        Leaf.of(name, x, spec, dict(mesh.shape)), num_parts=num_parts, pad_above_bytes=1 << 62
    )
    used, dim = entries(spec, x.ndim), None
    if choice.dim is not None:
        used[choice.dim] = (*used[choice.dim], *axes)
        dim = choice.dim - x.ndim
    variable.set_value(put(x, NamedSharding(mesh, as_spec(used), memory_kind=before.memory_kind)))
    reason = choice.reason.partition(";")[0]
    variable.set_metadata(KEY, Record(dim, axes, reason=reason, size=choice.size))


def _lies(x: Any, mesh: jax.sharding.Mesh) -> NamedSharding:
    """How an array lies on the mesh; replicated, if it does not lie there yet."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding
    return NamedSharding(mesh, PartitionSpec())


def _check_not_sharded(name: str, spec: PartitionSpec, axes: tuple[str, ...]) -> None:
    twice = sorted({axis for names in entries(spec, len(spec)) for axis in names} & set(axes))
    if twice:
        raise ParallelizeError(
            f"shard_optimizer_state: {name} is sharded over {twice[0]!r} already, as {spec}. The state of a model in "
            f"fully_shard follows its parameters, so there is nothing to do (nor is there in a second call). Remove the "
            f"call."
        )


@dataclass(frozen=True)
class Cut:
    """How the state of a replicated parameter is sharded.

    Args:
        sharding: of the state, when it is in device memory.
        dim: the dim that is cut.
        axes: the mesh axes that cut it and not the parameter, the first varying slowest.
    """

    sharding: NamedSharding
    dim: int
    axes: tuple[str, ...]


def cuts_of(model: nnx.Module, optimizer: nnx.Optimizer) -> dict[int, Cut]:
    """Returns how state is cut while its parameter is not, by the parameter's variable (`id`).

    State belongs to the parameter whose path its own path ends with; it counts if it has the parameter's shape.
    """
    parameters = {path: node for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)}
    found: dict[int, Cut] = {}
    for path, node in nnx.iter_graph(optimizer):
        if not isinstance(node, nnx.OptVariable):
            continue
        owner = next((parameters[path[i:]] for i in range(1, len(path)) if path[i:] in parameters), None)
        cut = None if owner is None else _cut_of(node.get_value(), owner.get_value())
        if cut is not None:
            found.setdefault(id(owner), cut)
    return found


def _cut_of(state: Any, parameter: Any) -> Cut | None:
    ours, theirs = (getattr(x, "sharding", None) for x in (state, parameter))
    if not isinstance(ours, NamedSharding) or not isinstance(theirs, NamedSharding):
        return None
    if state.shape != parameter.shape or ours.mesh != theirs.mesh:
        return None
    pairs = zip(entries(ours.spec, state.ndim), entries(theirs.spec, state.ndim), strict=True)
    cuts = [(dim, more[len(less) :]) for dim, (more, less) in enumerate(pairs) if more != less]
    on_device = NamedSharding(ours.mesh, ours.spec)
    return Cut(on_device, *cuts[0]) if len(cuts) == 1 and cuts[0][1] else None
