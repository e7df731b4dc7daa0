"""Updates whose gradients, or whose loss, are out of proportion are left out.

gradient norm, or loss    1.0  1.1  0.9  40.  1.0  nan  1.2
usual size                1.0  1.0  1.0  1.0  1.0  1.0  1.0         its moving average; a spike counts as `factor` times it
update                     x    x    x         x         x
"""

from typing import Any, Literal, NamedTuple, get_args

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
        usual_size: moving average of the norms, or losses.
        last_size: of the last gradients, or the last loss.
        inner: of the optimizer inside.
    """

    num_updates: jax.Array
    num_skipped: jax.Array
    usual_size: jax.Array
    last_size: jax.Array
    inner: Any


Watched = Literal["grad_norm", "loss"]


def skip_spikes(
    tx: optax.GradientTransformation,
    *,
    of: Watched = "grad_norm",
    factor: float = 4.0,
    decay: float = 0.99,
    warmup_steps: int = 20,
) -> optax.GradientTransformationExtraArgs:
    """Leaves out updates whose gradient norm, or loss, is above `factor` times its moving average, or is not finite.

    Then parameters stay, and so does the state of `tx`. A spike enters the average as `factor` times it, so sizes that stay larger
    are accepted after some steps. Any layout; for sharded gradients the norm takes all-reduces of single numbers. A pipelined
    model takes `of="loss"` alone, and refuses what looks at the gradients of all stages (`TrainStep(clip_norm=...)` clips there).

    The counts are in the optimizer's state: `optax.tree_utils.tree_get(optimizer.opt_state, "num_skipped")[...]`, and in the same
    way `last_size` and `usual_size`. For a fixed limit there is `optax.skip_large_updates`, for non-finite numbers alone
    `optax.apply_if_finite`.

    Args:
        tx: what makes an update of the gradients that are let through.
        of: what is watched. The loss is `tx.update(..., value=loss)`, which `TrainStep` gives; losses near 0 or below have no
            proportion.
        factor: above 1.
        decay: of the moving average, from 0 to below 1.
        warmup_steps: for how many updates at the beginning only what is not finite is skipped; at least 1.

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
            f"skip_spikes: {factor=} must be above 1, {decay=} from 0 to below 1, and {warmup_steps=} at least 1: there is no usual size "
            f"before the first. Leave them out for their defaults."
        )
    if of not in get_args(Watched):
        raise ParallelizeError(
            f"skip_spikes: {of=} is none of {get_args(Watched)}. Leave it out: the gradients' norm."
        )
    inner = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> SpikeState:
        def zero(dtype: Any) -> jax.Array:
            return jnp.zeros((), dtype)

        return SpikeState(
            zero(jnp.int32), zero(jnp.int32), zero(jnp.float32), zero(jnp.float32), inner.init(params)
        )

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, SpikeState]:
        size = _loss(extra) if of == "loss" else total_norm(updates)
        size = size.astype(jnp.float32)
        is_early, limit = state.num_updates < warmup_steps, factor * state.usual_size
        is_finite = jnp.isfinite(size)
        is_taken = is_finite & (is_early | (size <= limit))
        updates, after = inner.update(updates, state.inner, params, **extra)
        updates = jax.tree.map(lambda x: jnp.where(is_taken, x, jnp.zeros_like(x)), updates)
        after = jax.tree.map(lambda new, old: jnp.where(is_taken, new, old), after, state.inner)
        entered = jnp.where(is_taken, size, jnp.where(is_finite, limit, state.usual_size))
        # Without bias: the mean of all at first, and a moving average once there are more than 1 / (1 - decay).
        share = jnp.maximum(1 - decay, 1 / (state.num_updates + 1))
        usual = state.usual_size + share * (entered - state.usual_size)
        counts = (state.num_updates + 1, state.num_skipped + jnp.where(is_taken, 0, 1))
        return updates, SpikeState(*counts, usual, size, after)

    return optax.GradientTransformationExtraArgs(init, update)


def _loss(extra: dict[str, Any]) -> jax.Array:
    if "value" not in extra:
        raise ParallelizeError(
            'skip_spikes(of="loss"): there is no loss. Write tx.update(grads, state, params, value=loss), as jaxpar.TrainStep does.'
        )
    return jnp.asarray(extra["value"])
