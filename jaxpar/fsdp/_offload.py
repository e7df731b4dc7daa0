"""Parameters and optimizer state that lie in host memory between steps.

between steps    host: shards of parameters, state            device: nothing of them
in a step        host  --copy-->  device: forward, backward, update  --copy-->  host

The array's own sharding is the record: `array.sharding.memory_kind == "pinned_host"`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import NamedSharding

from jaxpar._errors import ParallelizeError
from jaxpar.mesh import MeshLike, as_jax_mesh
from jaxpar.mesh._place import place

HOST = "pinned_host"
OptimizerT = TypeVar("OptimizerT", bound=nnx.Optimizer)


@dataclass(frozen=True)
class CPUOffloadPolicy:
    """Parameters lie in host memory between steps, and with them the state of an optimizer built from them.

    For `fully_shard(..., offload_policy=...)`. The program of a `TrainStep` copies them to the device before it uses them
    and the updated ones back, so device memory between steps holds neither. For the optimizer's state alone, call
    `offload_optimizer_state`. PyTorch's `CPUOffloadPolicy` (row F7).

    Args:
        pin_memory: must be True: JAX programs read host memory that is pinned.

    Raises:
        ParallelizeError: `pin_memory` is False.

    Example:
        >>> from jaxpar.fsdp import CPUOffloadPolicy
        >>> CPUOffloadPolicy()
        CPUOffloadPolicy(pin_memory=True)
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not self.pin_memory:
            raise ParallelizeError(
                "CPUOffloadPolicy(pin_memory=False): compiled programs copy from and to pinned host memory only, so pageable "
                "memory would have to be copied by Python in every step. Write CPUOffloadPolicy()."
            )


def offload_optimizer_state(optimizer: OptimizerT, mesh: MeshLike) -> OptimizerT:
    """Moves the state that an optimizer keeps for each parameter to host memory (Adam's mu and nu), to stay there.

    The program of a `TrainStep` copies it to the device before the update and back after it. Numbers are the same to the
    last bit; device memory between steps does not hold the state. Arrays keep their sharding: of a model in `fully_shard`,
    or after `shard_optimizer_state`, each host holds its devices' parts.

    Args:
        optimizer: concrete or abstract. Changed in place.
        mesh: the mesh of the job; state that does not lie on it yet is replicated.

    Returns:
        `optimizer`, the same object.

    Raises:
        ParallelizeError: the backend has no pinned host memory, or the optimizer keeps no array per parameter.

    Example:
        >>> import jaxpar, optax
        >>> from flax import nnx
        >>> from jaxpar.fsdp import offload_optimizer_state
        >>> model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> optimizer = offload_optimizer_state(optimizer, jaxpar.init_device_mesh((8,), ("dp",)))
        >>> optimizer.opt_state[0].mu.kernel.sharding.memory_kind
        'pinned_host'
    """
    state = [node for _, node in nnx.iter_graph(optimizer) if isinstance(node, nnx.OptVariable)]
    if not state:
        raise ParallelizeError(
            "offload_optimizer_state: the optimizer keeps no array per parameter (such as Adam's mu and nu), so there is "
            "nothing to move. Remove the call."
        )
    for variable, value in zip(state, place([v.get_value() for v in state], as_jax_mesh(mesh)), strict=True):
        variable.set_value(to_host(value))
    return optimizer


def with_host_memory(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding in the host memory of its devices.

    Raises:
        ParallelizeError: the backend has no pinned host memory.
    """
    device = min(sharding.device_set, key=lambda device: device.id)
    check_host_memory(device.platform, [memory.kind for memory in device.addressable_memories()])
    return sharding.with_memory_kind(HOST)


def check_host_memory(platform: str, kinds: Iterable[str]) -> None:
    """Raises ParallelizeError if a backend, which has these kinds of memory, has no pinned host memory."""
    kinds = list(kinds)
    if HOST not in kinds:
        raise ParallelizeError(
            f"offloading needs memory of the kind {HOST!r}, which the backend {platform!r} does not have: its devices have "
            f"{kinds} (devices that are only compiled for list none). Train without offloading here: drop offload_policy and offload_optimizer_state."
        )


def to_host(x: Any) -> Any:
    """Returns an array on a mesh, or an abstract one, in host memory; its sharding stays.

    Raises:
        ParallelizeError: the backend has no pinned host memory.
    """
    sharding = with_host_memory(x.sharding)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)


def on_device(x: jax.Array) -> jax.Array:
    """Returns an array in device memory, traced or not; one that is there already is returned itself."""
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        return jax.device_put(x, jax.memory.Space.Device)
    return x
