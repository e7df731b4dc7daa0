"""Losses and metrics of one device become those of the whole batch, in one all-reduce.

each device   loss (total, count), metrics {name: (total, count)}, buffers to be made equal
one vector    [total, count, total, count, ..., buffers of rank 0]  --all-reduce-->  the same, summed
everywhere    value = total / count
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar._errors import BatchError
from jaxpar._mean import Mean, divide
from jaxpar._module import vary, varying_axes
from jaxpar._pytree import PyTree, leaf_names


def split_output(output: Any) -> tuple[Mean, dict[str, PyTree]]:
    """Returns the loss and the metrics of what a loss function returned, everything as `Mean`.

    A plain number is one part of a mean of equal parts: its count is None, and is known without communication.

    Raises:
        BatchError: the loss is no floating scalar, or the metrics are no dict.
    """
    loss, metrics = output if isinstance(output, tuple) else (output, {})
    loss = _as_mean(loss)
    total = jnp.asarray(loss.total)
    if total.shape or not jnp.issubdtype(total.dtype, jnp.floating):
        raise BatchError(
            f"loss_fn returned a loss of type {total.dtype}{list(total.shape)}, but a loss is one floating number per "
            f"device. Return losses.mean(), or jaxpar.Mean(total=losses.sum(), count=losses.size)."
        )
    if not isinstance(metrics, dict) or {"loss", "grad_norm"} & set(metrics):
        raise BatchError(
            f"loss_fn's second result must be a dict of metrics without the names 'loss' and 'grad_norm', which "
            f"TrainStep fills in; got {sorted(metrics) if isinstance(metrics, dict) else type(metrics).__name__}. "
            f"Write: return loss, {{'accuracy': jaxpar.Mean(hits.sum(), hits.size)}}"
        )
    as_means = jax.tree.map(_as_mean, metrics, is_leaf=lambda x: isinstance(x, Mean))
    return Mean(total, loss.count), as_means


def _as_mean(x: Any) -> Mean:
    """A count that is a plain Python number is the same on every rank: the parts are equal then too."""
    if isinstance(x, Mean) and not isinstance(x.count, int | float):
        return x
    part = divide(jnp.asarray(x.total), x.count) if isinstance(x, Mean) else jnp.asarray(x)
    return Mean(part, None)  # type: ignore[arg-type]


def weighted(means: PyTree, weight: float) -> PyTree:
    """Means of parts that are not equal: one without a count of its own counts as `weight` of them."""

    def of(mean: Mean) -> Mean:
        return Mean(mean.total * weight, mean.count) if mean.count is None else mean

    return means if weight == 1.0 else jax.tree.map(of, means, is_leaf=lambda x: isinstance(x, Mean))


def sum_over_ranks(
    means: PyTree,
    buffers: Sequence[jax.Array],
    axes: tuple[str, ...],
    *,
    is_buffer_mean: bool = False,
    replicas: tuple[str, ...] = (),
) -> tuple[PyTree, list[jax.Array]]:
    """Sums all totals and counts over `axes`, and makes buffers equal: one all-reduce in all.

    Args:
        means: pytree of `Mean`, per device.
        buffers: floating arrays that may differ between the ranks of `axes`.
        axes: mesh axes; none means that nothing is done.
        is_buffer_mean: buffers become their mean, instead of those of rank 0.
        replicas: mesh axes along which means and buffers may go on differing.

    Raises:
        BatchError: a loss or metric differs along another axis of the mesh.
    """
    _check_types(means, (*axes, *replicas))
    if not axes:
        return means, list(buffers)
    leaves, treedef = jax.tree.flatten(means)
    leaves = [jnp.asarray(x) for x in leaves]
    share = 1 / jax.lax.axis_size(axes) if is_buffer_mean else jax.lax.axis_index(axes) == 0
    kept = [(x * share).astype(x.dtype) if is_buffer_mean else jnp.where(share, x, 0) for x in buffers]
    dtype = jnp.result_type(
        jnp.float32, *(x.dtype for x in leaves + kept if jnp.issubdtype(x.dtype, jnp.floating))
    )
    vector = jnp.concatenate([vary(x, axes).astype(dtype).ravel() for x in leaves + kept])
    summed = _split(jax.lax.psum(vector, axes), leaves + kept)
    # An integer count keeps the vector's type: the sum over ranks may not fit its own.
    as_before = [
        s if jnp.issubdtype(x.dtype, jnp.integer) else s.astype(x.dtype)
        for s, x in zip(summed, leaves + kept, strict=True)
    ]
    return jax.tree.unflatten(treedef, as_before[: len(leaves)]), as_before[len(leaves) :]


def _split(vector: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    out, offset = [], 0
    for x in like:
        out.append(vector[offset : offset + x.size].reshape(x.shape))
        offset += x.size
    return out


def values(means: PyTree, num_parts: int) -> PyTree:
    """total / count of each `Mean`; a mean of equal parts has `num_parts` of them."""
    return jax.tree.map(
        lambda m: divide(m.total, float(num_parts) if m.count is None else m.count),
        means,
        is_leaf=lambda x: isinstance(x, Mean),
    )


def _check_types(means: PyTree, axes: tuple[str, ...]) -> None:
    for name, x in zip(leaf_names(means), jax.tree.leaves(means), strict=True):
        other = sorted(varying_axes(x) - set(axes))
        if other:
            raise BatchError(
                f"loss_fn's result {name!r} differs from device to device along mesh axis {other}, over which neither the batch "
                f"nor its sequences are split ({axes}). If layers are split over it, some output was left sharded or unsummed: "
                f"end with output_layouts=Replicate(), or take jaxpar.tp.cross_entropy of sharded logits. If it splits the "
                f"batch, write TrainStep(..., batch_axes={(*axes, *other)}); if its sequences, sequence_axes={other[0]!r}."
            )
