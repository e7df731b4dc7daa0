"""`Mean`: a mean that stays exact when its parts live on different devices, microbatches and steps.

mean of the whole  =  (total_0 + total_1 + ...) / (count_0 + count_1 + ...)      and not the mean of means
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A total and the number of things it was summed over.

    Returned by a loss function (or among its metrics) it makes the result exactly `total / count` over all
    ranks, microbatches and accumulation steps: token-weighted losses and masked samples are right in every
    layout. A mean over nothing is 0 with zero gradient, never NaN.

    Args:
        total: f32[...], the sum over the examples (tokens, ...) of this part.
        count: f32[...], how many there were; a weight of 0 takes an example out.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar import Mean
        >>> loss, mask = jnp.array([1.0, 3.0, 9.0]), jnp.array([1.0, 1.0, 0.0])
        >>> float(Mean(total=(loss * mask).sum(), count=mask.sum()).value)
        2.0
    """

    total: jax.Array
    count: jax.Array

    @property
    def value(self) -> jax.Array:
        """total / count, and 0 where count is 0."""
        return divide(self.total, self.count)


def divide(total: jax.Array, count: jax.Array | float) -> jax.Array:
    """total / count with 0 / 0 = 0, in the value and in the gradient."""
    empty = jnp.equal(count, 0)
    return jnp.where(empty, jnp.zeros_like(total), total / jnp.where(empty, 1, count))
