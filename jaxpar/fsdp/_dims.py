"""Which dim of a parameter is sharded, and why not.

dim 0 if it divides  >  the largest dim that divides  >  flat and padded, if large  >  replicated
"""

import math
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from jaxpar._errors import ParallelizeError
from jaxpar._spec import entries

DEFAULT_PAD_ABOVE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Choice:
    """How one parameter is stored.

    Args:
        dim: the sharded dim; None: replicated, or stored flat.
        is_flat: stored flat and padded.
        reason: why it is not simply sharded; empty if it is.
        size: length of that dim on a device that has gathered it.
    """

    dim: int | None
    is_flat: bool = False
    reason: str = ""
    size: int = 0


@dataclass(frozen=True)
class Leaf:
    """One parameter before it is sharded.

    Args:
        name: its dotted name, for messages.
        shape: global shape.
        itemsize: bytes of an element.
        spec: how it is sharded already (a tensor-parallel axis).
        left: elements of each dim that this leaves on a device.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    spec: PartitionSpec
    left: tuple[int, ...]

    @classmethod
    def of(cls, name: str, x: Any, spec: PartitionSpec, sizes: dict[str, int]) -> "Leaf":
        """Args: an array or `jax.ShapeDtypeStruct`, its spec, and the size of each mesh axis."""
        used = entries(spec, x.ndim)
        left = tuple(
            size // math.prod(sizes[a] for a in axes) for size, axes in zip(x.shape, used, strict=True)
        )
        return cls(name, tuple(x.shape), x.dtype.itemsize, spec, left)


def choose_dim(leaf: Leaf, *, num_parts: int, pad_above_bytes: int) -> Choice:
    """Returns how to cut a parameter into `num_parts` more parts; those above `pad_above_bytes` flat if no dim divides."""
    if not leaf.shape:
        return Choice(None, reason="a scalar has no dim")
    divides = [dim for dim, size in enumerate(leaf.left) if size and size % num_parts == 0]
    if 0 in divides:
        return Choice(0, size=leaf.left[0])
    if divides:
        largest = max(divides, key=lambda dim: leaf.left[dim])
        return Choice(largest, size=leaf.left[largest])
    why = f"no dim of {list(leaf.left)} divides by {num_parts}"
    if leaf.left != leaf.shape:
        return Choice(None, reason=f"{why}, beside {leaf.spec}")
    num_bytes = math.prod(leaf.shape) * leaf.itemsize
    if num_bytes and num_bytes >= pad_above_bytes:
        return Choice(None, is_flat=True, reason=f"{why}: stored flat and padded, one dim for the optimizer")
    return Choice(None, reason=f"{why}; smaller than pad_above_bytes={pad_above_bytes}")


def checked_dim(leaf: Leaf, dim: int, num_parts: int) -> Choice:
    """A dim that the user chose.

    Raises:
        ParallelizeError: there is no such dim, or it does not divide.
    """
    if not -len(leaf.shape) <= dim < len(leaf.shape):
        raise ParallelizeError(
            f"fully_shard: shard_dim_fn chose dim {dim} of {leaf.name}, whose shape is {list(leaf.shape)}. Return a dim that is "
            f"there, or None to let fully_shard choose."
        )
    dim %= len(leaf.shape)
    if not leaf.left[dim] or leaf.left[dim] % num_parts:
        good = [d for d, size in enumerate(leaf.left) if size and size % num_parts == 0]
        cure = (
            f"Return one of {good}" if good else "No dim divides: return None to store it flat or replicated"
        )
        raise ParallelizeError(
            f"fully_shard: shard_dim_fn chose dim {dim} of {leaf.name}, which has {leaf.left[dim]} rows on each device; they do "
            f"not divide into {num_parts} parts ({leaf.left[dim]} % {num_parts} = {leaf.left[dim] % num_parts}). {cure}."
        )
    return Choice(dim, size=leaf.left[dim])
