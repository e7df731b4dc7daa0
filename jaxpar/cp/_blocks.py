"""The sequence dim of a rank as a leading dim of blocks, which a loop can index, and back.

x  f32[..., L, E]  ->  f32[N, ..., L/N, E]        x  i32[..., L]  ->  i32[N, ..., L/N]
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxpar._pytree import PyTree


def to_blocks(x: jax.Array, num_blocks: int, *, dim: int) -> jax.Array:
    """Cuts a dim, counted from the end, into blocks; the block dim comes first."""
    at = x.ndim + dim
    cut = x.reshape(*x.shape[:at], num_blocks, x.shape[at] // num_blocks, *x.shape[at + 1 :])
    return jnp.moveaxis(cut, at, 0)


def from_blocks(x: jax.Array, *, dim: int) -> jax.Array:
    """Undoes `to_blocks`."""
    at = x.ndim + dim - 1
    whole = jnp.moveaxis(x, 0, at)
    return whole.reshape(*whole.shape[:at], -1, *whole.shape[at + 2 :])


def take(blocks: PyTree, index: ArrayLike) -> PyTree:
    """One block of every array of a tree."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), blocks)


def put(blocks: PyTree, index: ArrayLike, block: PyTree) -> PyTree:
    """Replaces one block of every array of a tree; in a loop XLA writes in place."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, index, 0), blocks, block)
