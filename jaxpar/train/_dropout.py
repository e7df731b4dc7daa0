"""Dropout whose mask depends on (key, position in the global batch) and not on the mesh.

global batch   row 0 .. row B-1            each row has its own key: fold_in(key, row)
device r       rows r*B/n .. (r+1)*B/n-1   draws exactly the masks that one device would have drawn for them
rank t of tp   positions of its part       cuts them out of the row's mask (`SequenceParallel` says along which dim)
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._module import INNERMOST, swap_class, vary, varying_axes
from jaxpar.tp import SequenceParallel
from jaxpar.tp._style import is_live, style_of


def use_global_positions(model: nnx.Module, axes: tuple[str, ...]) -> None:
    """Makes every `nnx.Dropout` of `model` draw its mask by global row, in place.

    Dim 0 of a dropout's input must be the batch dim, or batch and sequence flattened into one. `model` must be a
    copy that lives only in the trace.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Dropout):
            swap_class(module, "ByRow", _dropout_by_row, {"_jaxpar_batch_axes": axes}, level=INNERMOST)


def _dropout_by_row(
    original: Any, self: Any, inputs: jax.Array, *, deterministic: bool | None = None, rngs: Any = None
) -> jax.Array:
    """`inputs` f32[B/n, ...] per device; 0 < rate < 1 draws, everything else is Flax's own business."""
    off = self.deterministic if deterministic is None else deterministic
    rngs = self.rngs if rngs is None else rngs
    if off or off is None or rngs is None or not inputs.ndim or not 0.0 < self.rate < 1.0:
        return original(inputs, deterministic=deterministic, rngs=rngs)
    keep = 1.0 - self.rate
    shape = [1 if dim in self.broadcast_dims else size for dim, size in enumerate(inputs.shape)]
    key = _draw_key(rngs, self.rng_collection)
    split = _split_dims(self, inputs)
    whole = [size * jax.lax.axis_size(split[dim]) if dim in split else size for dim, size in enumerate(shape)]
    mask = _mask_by_row(key, keep, whole, self._jaxpar_batch_axes)
    for dim, axis in split.items():
        if whole[dim] > 1:
            start = jax.lax.axis_index(axis) * shape[dim]
            mask = jax.lax.dynamic_slice_in_dim(vary(mask, (axis,)), start, shape[dim], dim)
    return jnp.where(jnp.broadcast_to(mask, inputs.shape), inputs / keep, jnp.zeros_like(inputs))


def _split_dims(module: Any, inputs: jax.Array) -> dict[int, str]:
    """Dims of the input of which this device has a part, other than the batch dim, and the axes that split them.

    Raises:
        ParallelizeError: the input differs between the ranks of an axis, and no style says how it is split.
    """
    style = style_of(module)
    if isinstance(style, SequenceParallel) and style.axis is not None and is_live(style.axis):
        return {style.sequence_dim % inputs.ndim: style.axis}
    foreign = sorted(varying_axes(inputs) - set(module._jaxpar_batch_axes))
    if style is None and foreign:
        raise ParallelizeError(
            f"TrainStep: an nnx.Dropout(rate={module.rate}) has {inputs.dtype}{list(inputs.shape)} on each device, which differs between "
            f"the ranks of {foreign}, and nothing says along which dim it is split: ranks would drop the same elements of different "
            f"parts. Name it in the plan of parallelize_module: SequenceParallel(sequence_dim=1), or -1 between a column- and a "
            f"row-split layer; PrepareModuleInput() if all ranks have all of it."
        )
    return {}


def _mask_by_row(key: jax.Array, keep: float, shape: list[int], axes: tuple[str, ...]) -> jax.Array:
    """bool[B/n, ...]: one draw per row. A mask that is broadcast over the batch is one draw, equal everywhere."""
    if shape[0] == 1 or not axes:
        rank = 0
    else:
        rank = jax.lax.axis_index(axes)
    rows = rank * shape[0] + jnp.arange(shape[0])
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
    return jax.vmap(lambda row_key: jax.random.bernoulli(row_key, keep, tuple(shape[1:])))(keys)


def _draw_key(rngs: Any, collection: str) -> jax.Array:
    if isinstance(rngs, nnx.Rngs):
        return rngs[collection]()
    return rngs() if isinstance(rngs, nnx.RngStream) else rngs
