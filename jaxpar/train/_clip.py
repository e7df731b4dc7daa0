"""Gradient clipping by global norm: every element of every array counts once, wherever it lies.

norm_p = (sum over all elements |g|^p)^(1/p)            g <- g * min(1, max_norm / (norm + 1e-6))

    leaf f32[8@dp, 4]    each device: the sum over its rows    \
    leaf f32[6@dp, 2]    each device: the sum over its rows     > added, then one all-reduce of one number over dp
    leaf f32[3]          the same on all devices: no all-reduce

Left to XLA's partitioner, it is one all-reduce for each array (combined, where XLA does that, into one of many buffers).
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar._errors import ParallelizeError
from jaxpar._pytree import PyTree


def total_norm(grads: PyTree, *, norm_type: float = 2.0) -> jax.Array:
    """Returns the norm over all elements of all arrays, each counted once (PyTorch's `get_total_norm`, row Q2).

    Args:
        grads: pytree of arrays, global view, any sharding.
        norm_type: p >= 1, or `math.inf` for the largest absolute value.

    Raises:
        ParallelizeError: `norm_type` is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar.train import total_norm
        >>> float(total_norm({"w": jnp.array([3.0]), "b": jnp.array([4.0])}))
        5.0
    """
    norm = Norm(norm_type)
    return norm.root(norm.join(map(norm.part, jax.tree.leaves(grads))))


def clip_grad_norm(grads: PyTree, max_norm: float, *, norm_type: float = 2.0) -> tuple[PyTree, jax.Array]:
    """Scales gradients so that their norm is at most `max_norm` (PyTorch's `clip_grad_norm_`, row Q1).

    Args:
        grads: pytree of arrays, global view, any sharding.
        max_norm: the largest norm to let through.
        norm_type: p >= 1, or `math.inf`.

    Returns:
        The gradients times min(1, max_norm / (norm + 1e-6)), and the norm before clipping.

    Raises:
        ParallelizeError: `norm_type` is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar.train import clip_grad_norm
        >>> grads, norm = clip_grad_norm({"w": jnp.array([3.0, 4.0])}, 1.0)
        >>> float(norm), grads["w"].round(3).tolist()
        (5.0, [0.6000000238418579, 0.800000011920929])
    """
    return _scaled(grads, max_norm, total_norm(grads, norm_type=norm_type))


@dataclass(frozen=True)
class Norm:
    """A p-norm in three parts: of one array, of several, and the root at the end.

    Args:
        p: at least 1; `math.inf` for the largest absolute value.

    Raises:
        ParallelizeError: p is below 1.
    """

    p: float

    def __post_init__(self) -> None:
        if not self.p >= 1:
            raise ParallelizeError(
                f"norm_type must be at least 1 (or math.inf), got {self.p}: |x|^p is no norm below 1."
            )

    def part(self, x: jax.Array) -> jax.Array:
        """The sum of |x|^p, or the largest |x|; in fp32 at least."""
        x = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
        return jnp.max(x, initial=0) if math.isinf(self.p) else (x**self.p).sum()

    def join(self, parts: Iterable[jax.Array]) -> jax.Array:
        """That of all arrays together."""
        return functools.reduce(jnp.maximum if math.isinf(self.p) else jnp.add, parts, jnp.float32(0))

    def over(self, part: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """That of the pieces on all devices of manual mesh axes: one all-reduce, of one number."""
        if not axes:
            return part
        return jax.lax.pmax(part, axes) if math.isinf(self.p) else jax.lax.psum(part, axes)

    def root(self, total: jax.Array) -> jax.Array:
        """The norm."""
        return total if math.isinf(self.p) else total ** (1.0 / self.p)


def clipping(
    max_norm: float, norm_type: float, mesh: jax.sharding.Mesh, specs: Sequence[PartitionSpec]
) -> Callable[[list[jax.Array]], tuple[list[jax.Array], jax.Array]]:
    """Returns `clip_grad_norm` for arrays of known specs: one all-reduce per set of axes over which some are sharded.

    Args:
        max_norm: the largest norm to let through.
        norm_type: p >= 1, or `math.inf`.
        mesh: the mesh.
        specs: of each array, without axes of size 1.

    Raises:
        ParallelizeError: `norm_type` is below 1.
    """
    norm = Norm(norm_type)
    sharded = [_axes(spec) for spec in specs]

    def local(grads: list[jax.Array]) -> jax.Array:
        parts: dict[tuple[str, ...], list[jax.Array]] = {}
        for g, axes in zip(grads, sharded, strict=True):
            parts.setdefault(axes, []).append(norm.part(g))
        return norm.root(norm.join(norm.over(norm.join(mine), axes) for axes, mine in parts.items()))

    total = jax.shard_map(local, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec())
    return lambda grads: _scaled(grads, max_norm, total(grads))


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(
        sorted(name for entry in spec for name in ((entry,) if isinstance(entry, str) else entry or ()))
    )


def _scaled(grads: PyTree, max_norm: float, norm: jax.Array) -> tuple[PyTree, jax.Array]:
    scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads), norm
