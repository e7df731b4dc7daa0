"""The loss of each token from logits whose classes lie on several ranks, and its gradient without communication.

    rank 0              rank 1
    z_0 ... z_3         z_4 ... z_7       one token's logits, V = 8 classes, t = 2 ranks

    top     = max_c z_c                                                    all-reduce (max)
    total   = sum_c exp(z_c - top)      picked = z_y - top                 one all-reduce (sum) of all that is summed
    log Z   = top + log(total)          -log p_y = log(total) - picked

    loss    = k ((1 - e) (-log p_y) + a log^2 Z)  +  e/C sum_c w_c (-log p_c)
    dloss/dz_c = (k (1 - e + 2 a log Z) + e/C sum_c' w_c') p_c  -  k (1 - e) [c = y]  -  e/C w_c

k is the token's weight w_y, e the label smoothing, a the z-loss, C the number of classes. Each rank has all of the last
line: its own z_c and log Z, which is the same on all of them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.mesh._collectives_axes import ManualAxes, equal_over_unit, sum_over


@dataclass(frozen=True)
class Rule:
    """What the loss is, apart from the arrays.

    Args:
        axes: Axes that split the classes; none where the logits are whole.
        num_classes: Classes there are; columns of the logits beyond them are padding.
        ignore_index: Target of tokens that do not count.
        smoothing: Share of each target that is spread over all classes.
        z_loss: Factor of the squared logarithm of the softmax's denominator.
    """

    axes: ManualAxes
    num_classes: int
    ignore_index: int
    smoothing: float
    z_loss: float

    def columns(self, width: int) -> jax.Array:
        """i32[V/t]: the class of each of this rank's columns."""
        first = self.axes.rank() * width if self.axes.wide else 0
        return first + jnp.arange(width)

    def is_padded(self, width: int) -> bool:
        """Whether some columns of some rank are no classes."""
        return width * self.axes.num_ranks > self.num_classes


class Saved(NamedTuple):
    """What the backward reads: the logits as they came, and a few numbers for each token."""

    logits: jax.Array
    targets: jax.Array
    weights: jax.Array | None
    log_z: jax.Array
    token_weights: jax.Array
    weight_sum: jax.Array | None


def stats_dtype(logits: jax.Array) -> jnp.dtype:
    """Sums are taken in float32 at least."""
    return jnp.promote_types(logits.dtype, jnp.float32)


def _row_losses(
    rule: Rule, logits: jax.Array, targets: jax.Array, weights: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Each token's loss, and the weight with which it counts in a mean.

    Args:
        rule: The loss.
        logits: f32[..., V/t], this rank's columns.
        targets: i32[...], the same on all ranks.
        weights: f32[V/t] of this rank's classes, 0 for padding; None: all 1.

    Returns:
        f32[...] and f32[...], the same on all ranks. Both are 0 where the target is the ignored one, and NaN where it is
        no class.
    """
    return _forward(rule, logits, targets, weights)[0]


def _forward(
    rule: Rule, logits: jax.Array, targets: jax.Array, weights: jax.Array | None
) -> tuple[tuple[jax.Array, jax.Array], Saved]:
    z = _statistics(rule, logits)
    top = _top(rule, z)
    shifted = z - top[..., None]
    at, mine = _own_column(rule, targets, logits.shape[-1])

    def picked(table: jax.Array) -> jax.Array:
        return jnp.where(mine, table, 0)

    parts = {
        "total": jnp.exp(shifted).sum(-1),
        "picked": picked(jnp.take_along_axis(shifted, at[..., None], axis=-1)[..., 0]),
    }
    if weights is not None:
        parts["weight"] = picked(weights[at])
    if rule.smoothing:
        spread = _spread(rule, weights, z)
        parts["spread"] = jnp.where(spread != 0, spread * shifted, 0).sum(-1)
        parts["weight_sum"] = spread.sum()
    sums = _packed_sum(parts, rule.axes)

    log_total = jnp.log(sums["total"])
    log_z = log_total + top
    token_weights = _token_weights(rule, targets, sums.get("weight"), log_z.dtype)
    own = (1 - rule.smoothing) * (log_total - sums["picked"]) + rule.z_loss * log_z**2
    losses = token_weights * own
    if rule.smoothing:
        even = sums["weight_sum"] * log_total - sums["spread"]
        losses += rule.smoothing / rule.num_classes * even
    losses = jnp.where(targets == rule.ignore_index, 0, losses)
    saved = Saved(logits, targets, weights, log_z, token_weights, sums.get("weight_sum"))
    return (losses, token_weights), saved


def _backward(
    rule: Rule, saved: Saved, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None, None]:
    g, _ = cotangents
    z = _statistics(rule, saved.logits)
    at, mine = _own_column(rule, saved.targets, z.shape[-1])
    token, even = saved.token_weights, rule.smoothing / rule.num_classes
    factor = token * (1 - rule.smoothing + 2 * rule.z_loss * saved.log_z)
    if saved.weight_sum is not None:
        factor += even * saved.weight_sum
    is_target = (jnp.arange(z.shape[-1]) == at[..., None]) & mine[..., None]
    dz = factor[..., None] * jnp.exp(z - saved.log_z[..., None])
    dz -= jnp.where(is_target, (token * (1 - rule.smoothing))[..., None], 0)
    if rule.smoothing:
        dz -= even * _spread(rule, saved.weights, z)
    ignored = (saved.targets == rule.ignore_index)[..., None]
    dz = jnp.where(ignored, 0, g[..., None] * dz)
    return dz.astype(saved.logits.dtype), None, None


row_losses = jax.custom_vjp(_row_losses, nondiff_argnums=(0,))
row_losses.defvjp(_forward, _backward)


def _statistics(rule: Rule, logits: jax.Array) -> jax.Array:
    """The logits in which sums are taken, padding at minus infinity: probability 0."""
    z = logits.astype(stats_dtype(logits))
    if not rule.is_padded(z.shape[-1]):
        return z
    return jnp.where(rule.columns(z.shape[-1]) < rule.num_classes, z, -jnp.inf)


def _top(rule: Rule, z: jax.Array) -> jax.Array:
    """The largest logit of each token, over all ranks; 0 where all are minus infinity."""
    top = equal_over_unit(lax.stop_gradient(z.max(-1)), rule.axes)
    top = lax.pmax(top, rule.axes.wide) if rule.axes.wide else top
    return jnp.where(jnp.isneginf(top), 0, top)


def _own_column(rule: Rule, targets: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Which of this rank's columns is the token's target, and whether any is."""
    at = targets - (rule.axes.rank() * width if rule.axes.wide else 0)
    mine = (at >= 0) & (at < width)
    return jnp.where(mine, at, 0), mine


def _spread(rule: Rule, weights: jax.Array | None, z: jax.Array) -> jax.Array:
    """f32[V/t]: how much label smoothing gives to each of this rank's classes."""
    if weights is not None:
        return weights.astype(z.dtype)
    return (rule.columns(z.shape[-1]) < rule.num_classes).astype(z.dtype)


def _token_weights(rule: Rule, targets: jax.Array, weights: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """The weight of each token's class; 0 for ignored ones, NaN for what is no class."""
    ones = jnp.ones(targets.shape, dtype) if weights is None else weights.astype(dtype)
    known = (targets >= 0) & (targets < rule.num_classes)
    return jnp.where(targets == rule.ignore_index, 0, jnp.where(known, ones, jnp.nan))


def _packed_sum(parts: dict[str, jax.Array], axes: ManualAxes) -> dict[str, jax.Array]:
    """The sum of each over the ranks, all in one buffer and one all-reduce."""
    if not axes.wide:
        return {name: equal_over_unit(part, axes) for name, part in parts.items()}
    buffer = sum_over(jnp.concatenate([part.ravel() for part in parts.values()]), axes)
    sums, start = {}, 0
    for name, part in parts.items():
        sums[name] = lax.slice_in_dim(buffer, start, start + part.size).reshape(part.shape)
        start += part.size
    return sums
