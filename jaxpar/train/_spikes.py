"""Updates whose gradients are out of proportion are left out.

norm of the gradients    1.0  1.1  0.9  40.  1.0  nan  1.2
usual norm               1.0  1.0  1.0  1.0  1.0  1.0  1.0         its moving average; a spike counts as `factor` times it
update                    x    x    x         x         x
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar._errors import ParallelizeError
from jaxpar._pytree import PyTree
from jaxpar.train._clip import total_norm


class SpikeState(NamedTuple):
    """What `skip_spikes` keeps.

    Args:
        num_updates: how many there were, with those that were skipped.
        num_skipped: of them, skipped.
        usual_norm: moving average of the norms.
        last_norm: of the last gradients.
        inner: of the optimizer inside.
    """

    num_updates: jax.Array
    num_skipped: jax.Array
    usual_norm: jax.Array
    last_norm: jax.Array
    inner: Any


def skip_spikes(
    tx: optax.GradientTransformation, *, factor: float = 4.0, decay: float = 0.99, warmup_steps: int = 20
) -> optax.GradientTransformationExtraArgs:
    """Leaves out updates whose gradient norm is above `factor` times its moving average, or is not finite.

    Then parameters stay, and so does the state of `tx`. A spike enters the average as `factor` times it, so norms that stay larger
    are accepted after some steps. Any layout; for sharded gradients the norm takes all-reduces of single numbers. A pipelined
    model refuses it, as everything that looks at the gradients of all stages: take `TrainStep(clip_norm=...)` there.

    The counts are in the optimizer's state: `optax.tree_utils.tree_get(optimizer.opt_state, "num_skipped")[...]`, and in the same
    way `last_norm` and `usual_norm`. For a fixed limit there is `optax.skip_large_updates`, for non-finite numbers alone
    `optax.apply_if_finite`.

    Args:
        tx: what makes an update of the gradients that are let through.
        factor: above 1.
        decay: of the moving average, from 0 to below 1.
        warmup_steps: for how many updates at the beginning only norms that are not finite are skipped; at least 1.

    Returns:
        An optax transformation.

    Raises:
        ParallelizeError: an option that has no meaning.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxpar.train import skip_spikes
        >>> tx = skip_spikes(optax.sgd(1.0), factor=4.0, warmup_steps=1)
        >>> state = tx.init(jnp.array(0.0))
        >>> for grad in (1.0, 2.0, 40.0, jnp.nan, 1.0):
        ...     update, state = tx.update(jnp.array(grad), state)
        >>> int(state.num_skipped), float(update)
        (2, -1.0)
    """
    if not factor > 1 or not 0 <= decay < 1 or warmup_steps < 1:
        raise ParallelizeError(
            f"skip_spikes: {factor=} must be above 1, {decay=} from 0 to below 1, and {warmup_steps=} at least 1: there is no usual norm "
            f"before the first. Leave them out for their defaults."
        )
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> SpikeState:
        def zero(dtype: Any) -> jax.Array:
            return jnp.zeros((), dtype)

        return SpikeState(
            zero(jnp.int32), zero(jnp.int32), zero(jnp.float32), zero(jnp.float32), inner.init(params)
        )

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, SpikeState]:
        norm = total_norm(updates).astype(jnp.float32)
        is_early, limit = state.num_updates < warmup_steps, factor * state.usual_norm
        is_finite = jnp.isfinite(norm)
        is_taken = is_finite & (is_early | (norm <= limit))
        updates, after = inner.update(updates, state.inner, params, **extra)
        updates = jax.tree.map(lambda x: jnp.where(is_taken, x, jnp.zeros_like(x)), updates)
        after = jax.tree.map(lambda new, old: jnp.where(is_taken, new, old), after, state.inner)
        entered = jnp.where(is_taken, norm, jnp.where(is_finite, limit, state.usual_norm))
        # Without bias: the mean of all at first, and a moving average once there are more than 1 / (1 - decay).
        share = jnp.maximum(1 - decay, 1 / (state.num_updates + 1))
        usual = state.usual_norm + share * (entered - state.usual_norm)
        counts = (state.num_updates + 1, state.num_skipped + jnp.where(is_taken, 0, 1))
        return updates, SpikeState(*counts, usual, norm, after)

    return optax.GradientTransformationExtraArgs(init, update)
