"""Storage that any number of devices can share: an array as one padded dim.

f32[5, 3] for 4 devices   ->   f32[16] = 15 elements and one zero
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def padded_size(size: int, num_parts: int) -> int:
    """The smallest multiple of `num_parts` that holds `size` elements."""
    return -(-size // num_parts) * num_parts


def flatten_and_pad(x: jax.Array, length: int) -> jax.Array:
    """[D0, D1, ...] to [length]; padding is zero."""
    return jnp.pad(x.reshape(-1), (0, length - x.size))


def unflatten(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The inverse of `flatten_and_pad`."""
    return x[: math.prod(shape)].reshape(shape)
