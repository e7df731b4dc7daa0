"""What a variable remembers of being sharded: the dim, and its own shape if it is stored flat.

    kernel  f32[4096, 1024]   ->  P("dp", None)                dim -2: each device holds 4096 / n rows
    odd     f32[5, 3]         ->  f32[16] as P("dp"), shape (5, 3): flattened, padded to a multiple of n

Where an array lies is told by its sharding alone. Inside `jax.shard_map` a block has no sharding any more, and a
flat array no shape of its own; the record says what to do there. Flax copies it to the optimizer's variables.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpar._flat import unflatten

KEY = "jaxpar_fsdp"
PARTIAL = "jaxpar_partial_over"


@dataclass(frozen=True)
class Record:
    """Metadata of a sharded variable.

    Args:
        dim: sharded dim, counted from the last (-1), so that it still holds below a stacked layer dim; None: none is.
        axes: mesh axes, the first varying slowest.
        shape: the parameter's own shape, if it is stored flat and padded.
        reason: why it is not sharded along a dim of its own.
        size: length of the sharded dim on a device that has gathered it.
    """

    dim: int | None
    axes: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    reason: str = ""
    size: int = 0

    def is_shard(self, x: jax.Array) -> bool:
        """Whether a per-device array is a part; otherwise it is whole (gathered already, or never sharded)."""
        if self.dim is None or x.shape == self.shape:
            return False
        return x.shape[self.dim] != self.size


def record_of(variable: nnx.Variable[Any]) -> Record | None:
    """Returns what `fully_shard` noted, or None."""
    return variable.get_metadata().get(KEY)


def is_flat(variable: nnx.Variable[Any]) -> bool:
    """Whether the variable is stored flat and padded (an optimizer's variable only if it has the stored shape)."""
    record = record_of(variable)
    if record is None or record.shape is None:
        return False
    shape = variable.get_value().shape
    return len(shape) == 1 and shape[0] >= math.prod(record.shape)


def logical_shape(variable: nnx.Variable[Any]) -> tuple[int, ...]:
    """The shape that the model's code sees."""
    record = record_of(variable)
    is_own = record is not None and record.shape is not None and is_flat(variable)
    return record.shape if is_own else variable.get_value().shape  # pyright: ignore


def own_shape(variable: nnx.Variable[Any], whole: jax.Array) -> jax.Array:
    """A whole parameter in the shape that the model's code sees."""
    record = record_of(variable)
    if record is None or record.shape is None or whole.shape == record.shape:
        return whole
    return unflatten(whole, record.shape)


def mark_partial(variable: nnx.Variable[Any], axis: str) -> None:
    """Notes that a parameter, whole on all ranks of `axis`, is used there on each rank's own part of the activations.

    Its gradient is then a sum over `axis`, which a training step takes in one collective for all such parameters; JAX's
    own transpose would sum each one where it is used.
    """
    variable.set_metadata(PARTIAL, tuple(dict.fromkeys((*partial_axes(variable), axis))))


def partial_axes(variable: nnx.Variable[Any]) -> tuple[str, ...]:
    """The axes that `mark_partial` noted."""
    return variable.get_metadata().get(PARTIAL, ())
