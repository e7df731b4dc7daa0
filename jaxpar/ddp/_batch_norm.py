"""`convert_sync_batchnorm`: BatchNorm whose statistics are those of the global batch, however it is split.

    rank 0   [1 2 3]   sum 6   squares 14   count 3 \
                                                     one all-reduce   mean 16 / 4 = 4   variance 114 / 4 - 16 = 12.5
    rank 1   [10]      sum 10  squares 100  count 1 /

Masked samples are in no sum and in no count, so ranks that hold fewer (or no) real samples weigh less (nothing).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._mean import divide
from jaxpar._module import ModuleT, manual_axes, swap_class, vary, varying_axes
from jaxpar.ddp._module import CONFIG
from jaxpar.mesh import MeshLike, axes_of

AXES = "_jaxpar_sync_axes"


def convert_sync_batchnorm(model: ModuleT, mesh: MeshLike) -> ModuleT:
    """Makes every `nnx.BatchNorm` of a model use the statistics of the whole batch, not of each rank's part.

    Per layer in training, over the mesh's axes: forward one all-reduce of f32[2 * features + 1] (sum, sum of squares,
    count), or two with `use_fast_variance=False` (the mean first, then the squared deviations); backward one
    all-reduce of f32[2 * features], the gradients of mean and variance. With running averages, and where the axes are
    not manual (global view), nothing is added: it is Flax's BatchNorm, and XLA's partitioner does the work.

    The result equals one device on the union batch, also where `mask` hides different numbers of samples on
    different ranks. If it hides all samples of the batch, the running statistics stay as they are and outputs and
    gradients are finite. Running statistics are equal on all ranks; as in Flax they take the **biased** variance
    (sum / count), where PyTorch's take the unbiased one (sum / (count - 1)). With accumulation, a batch is one
    microbatch over all ranks: running statistics are updated once per microbatch, with as many all-reduces.

    Args:
        model: a Flax NNX module, concrete or abstract; changed in place. Before or after `DistributedDataParallel`.
        mesh: the axes that split the batch, such as `mesh["dp"]`.

    Returns:
        `model`, the same object.

    Raises:
        ParallelizeError: no BatchNorm in the model, or one that synchronises already or computes in its own way.

    Source: PyTorch's `SyncBatchNorm.convert_sync_batchnorm`.

    Example:
        >>> import jaxpar
        >>> from flax import nnx
        >>> from jaxpar.ddp import convert_sync_batchnorm
        >>> mesh = jaxpar.init_device_mesh((8,), ("dp",))
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
        >>> type(convert_sync_batchnorm(model, mesh).layers[1]).__name__
        'SyncBatchNorm'
    """
    found = [(path, m) for path, m in nnx.iter_modules(model) if isinstance(m, nnx.BatchNorm)]
    if not found:
        raise ParallelizeError(
            f"{type(model).__name__} holds no nnx.BatchNorm, so there are no statistics to synchronise. Remove the call "
            f"of convert_sync_batchnorm, or build the model with nnx.BatchNorm."
        )
    for path, module in found:
        _check(".".join(map(str, path)) or "the model itself", module)
    for _, module in found:
        swap_class(module, "Sync", _call, {AXES: axes_of(mesh)})
    return model


def _check(name: str, module: nnx.BatchNorm) -> None:
    cls = type(module)
    if hasattr(cls, AXES):
        raise ParallelizeError(
            f"{name}: synchronised already, over {getattr(cls, AXES)}. Statistics are summed once; call "
            f"convert_sync_batchnorm once, with all axes that split the batch."
        )
    if module.axis_name is not None:
        raise ParallelizeError(
            f"{name}: nnx.BatchNorm(axis_name={module.axis_name!r}) averages over that axis by itself, each rank with "
            f"the same weight. Remove axis_name: convert_sync_batchnorm weighs ranks by their number of samples."
        )
    owner = next(c for c in cls.__mro__ if "__call__" in vars(c) and CONFIG not in vars(c))
    if owner is not nnx.BatchNorm:
        raise ParallelizeError(
            f"{name}: {owner.__name__} has a __call__ of its own, which the synchronised computation would replace. "
            f"Put nnx.BatchNorm inside {owner.__name__} as an attribute instead of inheriting from it."
        )


def _call(
    original: Any,
    self: Any,
    x: jax.Array,
    use_running_average: bool | None = None,
    *,
    mask: jax.Array | None = None,
) -> jax.Array:
    """`x` f32[B/n, ..., C] per device; `mask` bool, broadcast to it, False where a sample does not count."""
    given = self.use_running_average if use_running_average is None else use_running_average
    if given is None or given or not set(getattr(self, AXES)) & set(manual_axes()):
        return original(x, use_running_average, mask=mask)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ParallelizeError(
            f"SyncBatchNorm got an input of dtype {x.dtype}: its statistics are those of real numbers. Normalise the "
            f"real and the imaginary part each with a BatchNorm of its own."
        )
    scale, bias = (None if p is None else p[...] for p in (self.scale, self.bias))
    x, _, _, scale, bias = self.promote_dtype(
        (x, self.mean[...], self.var[...], scale, bias), dtype=self.dtype
    )
    feature_dims = {d % x.ndim for d in ((self.axis,) if isinstance(self.axis, int) else self.axis)}
    dims = tuple(d for d in range(x.ndim) if d not in feature_dims)
    axes = getattr(self, AXES)
    mean, variance, count = _statistics(
        x.astype(jnp.promote_types(x.dtype, jnp.float32)), mask, dims, axes, self.use_fast_variance
    )
    for running, now in ((self.mean, mean), (self.var, variance)):
        running[...] = _moved(running[...], now, count, self.momentum)
    # Marked as varying together: the backward sums the gradients of both in one all-reduce.
    mean, variance = vary(jnp.stack([mean, variance]), _split_axes(axes, x, mask))
    shape = tuple(1 if d in dims else size for d, size in enumerate(x.shape))
    factor = jax.lax.rsqrt(variance + self.epsilon)
    y = (x - mean) * (factor if scale is None else factor * scale.reshape(shape))
    y = y if bias is None else y + bias.reshape(shape)
    return y.astype(self.dtype or jnp.result_type(*(p for p in (x, scale, bias) if p is not None)))


def _statistics(
    x: jax.Array,
    mask: jax.Array | None,
    dims: tuple[int, ...],
    axes: tuple[str, ...],
    use_fast_variance: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, biased variance and number of samples of the global batch, equal on all ranks of `axes`.

    Shapes f32[1, ..., C], the counts f32[1, ..., C] or f32[1, ..., 1].
    """
    axes = _split_axes(axes, x, mask)
    where = None if mask is None else jnp.broadcast_to(mask, x.shape) != 0

    def total(values: jax.Array) -> jax.Array:
        return values.sum(dims, keepdims=True, where=where)

    count = _count(x, mask, dims)
    if use_fast_variance:
        sums, squares, count = _sum_over_ranks([total(x), total(jnp.square(x)), count], axes)
        mean = divide(sums, count)
        return mean, jnp.maximum(divide(squares, count) - jnp.square(mean), 0), count
    sums, count = _sum_over_ranks([total(x), count], axes)
    mean = divide(sums, count)
    # The mean is where the squares are smallest: their derivative by it is 0, and needs no all-reduce.
    deviations = x - jax.lax.stop_gradient(mean)
    (squares,) = _sum_over_ranks([total(jnp.square(deviations))], axes)
    return mean, divide(squares, count), count


def _count(x: jax.Array, mask: jax.Array | None, dims: tuple[int, ...]) -> jax.Array:
    """Samples on this device: one number, or one per feature where the mask differs from feature to feature."""
    mask = jnp.ones((1,) * x.ndim, bool) if mask is None else jnp.asarray(mask) != 0
    mask = mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape)
    whole = tuple(x.shape[d] if d in dims else mask.shape[d] for d in range(x.ndim))
    return jnp.broadcast_to(mask, whole).sum(dims, keepdims=True, dtype=x.dtype)


def _split_axes(axes: tuple[str, ...], x: jax.Array, mask: jax.Array | None) -> tuple[str, ...]:
    """The axes along which samples differ; where they are equal on all ranks there is nothing to sum."""
    varying = varying_axes(x) | (frozenset() if mask is None else varying_axes(mask))
    return tuple(axis for axis in axes if axis in varying)


def _sum_over_ranks(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    if not axes:
        return list(arrays)
    vector = jax.lax.psum(jnp.concatenate([vary(x, axes).ravel() for x in arrays]), axes)
    out, offset = [], 0
    for x in arrays:
        out.append(vector[offset : offset + x.size].reshape(x.shape))
        offset += x.size
    return out


def _moved(running: jax.Array, now: jax.Array, count: jax.Array, momentum: float) -> jax.Array:
    """The running statistic after this batch; unchanged for features without a sample."""
    count = jnp.broadcast_to(count, now.shape).reshape(running.shape)
    moved = momentum * running + (1 - momentum) * now.reshape(running.shape)
    return jax.lax.stop_gradient(jnp.where(count > 0, moved, running).astype(running.dtype))
