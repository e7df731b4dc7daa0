"""Gradient clipping by global norm, in global view: the partitioner makes it right on any sharding.

norm_p = (sum over all elements |g|^p)^(1/p)            g <- g * min(1, max_norm / (norm + 1e-6))
"""

import math

import jax
import jax.numpy as jnp

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
    if norm_type < 1:
        raise ParallelizeError(
            f"norm_type must be at least 1 (or math.inf), got {norm_type}: |x|^p is no norm below 1."
        )
    leaves = [jnp.abs(g.astype(jnp.promote_types(g.dtype, jnp.float32))) for g in jax.tree.leaves(grads)]
    if not leaves:
        return jnp.float32(0)
    if math.isinf(norm_type):
        return jnp.max(jnp.stack([g.max() for g in leaves if g.size]))
    return sum((g**norm_type).sum() for g in leaves) ** (1.0 / norm_type)  # type: ignore[return-value]


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
    norm = total_norm(grads, norm_type=norm_type)
    scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads), norm
