"""Dropout whose mask depends on (key, position in the global batch) and not on the mesh.

global batch   row 0 .. row B-1            each row has its own key: fold_in(key, row)
device r       rows r*B/n .. (r+1)*B/n-1   draws exactly the masks that one device would have drawn for them
rank t of tp   positions of its part       cuts them out of the row's mask (`SequenceParallel` says along which dim)
microbatch i   rows i*b .. (i+1)*b-1 of a device's rows, with the key that the whole batch would have been given

A mask of one row is drawn once for all (dropout of positions, [1, T, D]). Where a device has one row, it is that row's: say
`nnx.Dropout(..., broadcast_dims=(0,))` for one that is meant for all.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._module import INNERMOST, swap_class, vary, varying_axes
from jaxpar.cp import split_sequence
from jaxpar.tp import SequenceParallel
from jaxpar.tp._style import is_live, style_of

SETTINGS, MICROBATCH = "_jaxpar_positions", "_jaxpar_microbatch"


@dataclass(frozen=True)
class Positions:
    """How the batch is split.

    Args:
        rows: axes over which its rows are.
        sequences: axes over which its sequences are, as `jaxpar.cp.split_sequence` does.
        num_microbatches: in how many parts each device takes its rows.
        num_rows: of each part.
        rows_of_rank: of each device, if its parts are not equal; else 0.
        first_row: where its first part would begin if all had as many rows as this one.
        stages: axes along which all ranks see the same rows and sequences, whatever JAX's types say.
        dealt_to: how many ranks the rows are numbered by, if the batch lies on another number of them here; else 0.
    """

    rows: tuple[str, ...]
    sequences: tuple[str, ...] = ()
    num_microbatches: int = 1
    num_rows: int = 0
    rows_of_rank: int = 0
    first_row: int = 0
    stages: tuple[str, ...] = ()
    dealt_to: int = 0

    def numbers(self, part: Any, size: int) -> jax.Array:
        """Numbers of this device's `size` rows of a part, among those of all devices."""
        rank = jax.lax.axis_index(self.rows) if self.rows else 0
        if not self.dealt_to:
            return self.first(rank, part, size) + jnp.arange(size)
        # Of a part, this device has rows that lie on one or several of the ranks that they are numbered by.
        num_here = jax.lax.axis_size(self.rows) if self.rows else 1
        own, place = size * num_here // self.dealt_to, rank * size + jnp.arange(size)
        return (place // own * self.num_microbatches + part) * own + place % own

    def first(self, rank: Any, part: Any, size: int) -> Any:
        """Number of the first of the `size` rows of a part, among those of all devices."""
        if not self.rows_of_rank:
            return (rank * self.num_microbatches + part) * size
        row = rank * self.rows_of_rank + part * self.num_rows + self.first_row
        return row * (size // self.num_rows)  # positions too, where batch and sequence are one dim


def use_global_positions(
    model: nnx.Module, positions: Positions, microbatch: jax.Array | None = None
) -> None:
    """Makes every `nnx.Dropout` of `model` draw its mask by global row and position, in place.

    Dim 0 of a dropout's input must be the batch dim, or batch and sequence flattened into one; if sequences are split, dim
    1 is the sequence. `model` must be a copy that lives only in the trace; `microbatch` is the number of this one.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Dropout):
            swap_class(module, "ByRow", _dropout_by_row, {SETTINGS: positions}, level=INNERMOST)
            if microbatch is not None:
                setattr(module, MICROBATCH, nnx.Variable(microbatch))


def own_counts(model: nnx.Module) -> set[int]:
    """Ids of the variables that count the keys that dropouts have drawn from streams of their own."""
    dropouts = [module for _, module in nnx.iter_modules(model) if isinstance(module, nnx.Dropout)]
    nodes = (node for dropout in dropouts for _, node in nnx.iter_graph(dropout))
    return {id(node) for node in nodes if isinstance(node, nnx.RngCount)}


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
    splits = [split for split in _splits(self, inputs) if split[0] not in self.broadcast_dims]
    whole = list(shape)
    for dim, axis in splits:
        whole[dim] *= jax.lax.axis_size(axis)
    positions: Positions = getattr(self, SETTINGS)
    microbatch = getattr(self, MICROBATCH, None)
    # Dim 0 of size 1 is broadcast over the batch, unless there is one row.
    has_rows = shape[0] > 1 or (0 not in self.broadcast_dims and positions.num_rows == 1)
    mask = _mask_by_row(key, keep, whole, positions, microbatch, has_rows=has_rows)
    for dim, axis in splits:
        mask = _own_part(mask, dim, axis, is_sequence=axis in positions.sequences)
    return jnp.where(jnp.broadcast_to(mask, inputs.shape), inputs / keep, jnp.zeros_like(inputs))


def _splits(module: Any, inputs: jax.Array) -> list[tuple[int, str]]:
    """Dims of the input of which this device has a part, other than the batch dim, and the axes that split them.

    Raises:
        ParallelizeError: the input differs between the ranks of an axis, and no style says how it is split.
    """
    style, positions = style_of(module), getattr(module, SETTINGS)
    splits = [(1, axis) for axis in positions.sequences if axis in varying_axes(inputs) and inputs.ndim > 2]
    if isinstance(style, SequenceParallel) and style.axis is not None and is_live(style.axis):
        splits = [split for split in splits if split[1] != style.axis]
        splits.append((style.sequence_dim % inputs.ndim, style.axis))
    foreign = sorted(
        varying_axes(inputs) - {*positions.rows, *positions.stages, *(axis for _, axis in splits)}
    )
    if style is None and foreign:
        raise ParallelizeError(
            f"TrainStep: an nnx.Dropout(rate={module.rate}) has {inputs.dtype}{list(inputs.shape)} on each device, which differs between "
            f"the ranks of {foreign}, and nothing says along which dim it is split: ranks would drop the same elements of different "
            f"parts. Name it in the plan of parallelize_module: SequenceParallel(sequence_dim=1), or -1 between a column- and a "
            f"row-split layer; PrepareModuleInput() if all ranks have all of it."
        )
    return splits


def _own_part(mask: jax.Array, dim: int, axis: str, *, is_sequence: bool) -> jax.Array:
    if is_sequence:
        return split_sequence(mask, axis, dim=dim)
    size = mask.shape[dim] // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(vary(mask, (axis,)), jax.lax.axis_index(axis) * size, size, dim)


def _mask_by_row(
    key: jax.Array, keep: float, shape: list[int], positions: Positions, microbatch: Any, *, has_rows: bool
) -> jax.Array:
    """bool[B/n, ...]: one draw per row. A mask that is broadcast over the batch is one draw, equal everywhere."""
    rows = jnp.arange(shape[0])
    if has_rows:
        rows = positions.numbers(0 if microbatch is None else microbatch.get_value(), shape[0])
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
    return jax.vmap(lambda row_key: jax.random.bernoulli(row_key, keep, tuple(shape[1:])))(keys)


def _draw_key(rngs: Any, collection: str) -> jax.Array:
    if isinstance(rngs, nnx.Rngs):
        return rngs[collection]()
    return rngs() if isinstance(rngs, nnx.RngStream) else rngs
