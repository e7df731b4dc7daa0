"""Arrays in memory: those whose `NamedSharding` says all, and those that need a word more.

    5 rows on 4 devices         0 1 | 2 3 | 4 . | . .       the sharding says 8 rows; 5 of them are real
    a maximum over 2 devices    terms a | b                 the sharding says two rows; the value is max(a, b)

A `PlacedArray` carries that word: the logical shape and the layout. It is a pytree of one leaf, made only where a
plain `jax.Array` cannot serve: dims that do not divide (under `pad=True`), and `Partial` ops other than sums.
"""

from dataclasses import dataclass, field
from functools import partial
from math import prod

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxpar._errors import PlacementError
from jaxpar.mesh._chunks import memory_rows
from jaxpar.mesh._init_mesh import as_device_mesh
from jaxpar.mesh._layout import (
    Layout,
    auto_twin,
    explicit_twin,
    layout_to_placements,
    layout_to_spec,
    spec_to_layout,
)
from jaxpar.mesh._placements import Placement
from jaxpar.mesh._plan import Extent


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["shape", "layout", "mesh"])
@dataclass(frozen=True, eq=False, repr=False)
class PlacedArray:
    """An array with padded dims, or with partial terms other than sums.

    `full_array`, `to_local`, `redistribute` and `placements_of` take it like a `jax.Array`, and neither they nor
    `sum` and `mean` see the padding. Made by `distribute(..., pad=True)`, `redistribute(..., pad=True)`,
    `from_local` and the factories; not by hand.

    Attributes:
        array: What is in memory. Terms lie side by side along dim 0, one for each rank of the partial axes.
        shape: The logical shape.
        layout: Which axes split each logical dim and which hold terms.
        mesh: The `jax.sharding.Mesh` it lies on.

    Example:
        >>> from jaxpar.mesh import Shard, distribute, init_device_mesh, to_local
        >>> x = distribute(jnp.ones((5, 10)), init_device_mesh((8,), ("dp",)), [Shard(0)], pad=True)
        >>> x.shape, [piece.shape[0] for piece in to_local(x)]
        ((5, 10), [1, 1, 1, 1, 1, 0, 0, 0])
    """

    array: jax.Array
    shape: tuple[int, ...] = field(metadata={"static": True})
    layout: Layout = field(metadata={"static": True})
    mesh: jax.sharding.Mesh = field(metadata={"static": True})

    @property
    def dtype(self) -> np.dtype:
        """Element type."""
        return np.dtype(self.array.dtype)

    @property
    def ndim(self) -> int:
        """Number of logical dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of real elements."""
        return prod(self.shape)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each axis of the mesh."""
        return layout_to_placements(self.layout, self.mesh)

    def sum(self) -> jax.Array:
        """Sum of all real elements, a scalar. Padding does not count; one all-reduce.

        Raises:
            PlacementError: The array holds terms that are not reduced yet.
        """
        if self.layout.partial:
            raise PlacementError(
                f"{self!r}: the terms over {self.layout.partial_axes} are not reduced yet, so sums over elements are "
                "not defined. Reduce first: full_array(x).sum()."
            )
        return jnp.sum(jnp.where(self._is_real(), self.array, 0))

    def mean(self) -> jax.Array:
        """Mean of all real elements, a scalar. Padding does not count; one all-reduce.

        Raises:
            PlacementError: The array holds terms that are not reduced yet.
        """
        return self.sum() / self.size

    def __repr__(self) -> str:
        places = ", ".join(str(place) for place in self.placements)
        memory = f", in memory {list(self.array.shape)}" if hasattr(self.array, "shape") else ""
        return f"PlacedArray({self.dtype}{list(self.shape)} as ({places}) on {as_device_mesh(self.mesh)!r}{memory})"

    def _is_real(self) -> jax.Array:
        """bool, broadcasting against what is in memory: which elements are not padding."""
        mask = jnp.ones((), bool)
        extent = extent_of(self.shape, self.array.dtype, self.mesh)
        for dim, axes in enumerate(self.layout.dims):
            rows = memory_rows(self.shape[dim], extent.parts(axes)) < self.shape[dim]
            mask = mask & rows.reshape((-1,) + (1,) * (self.ndim - dim - 1))
        return mask


@dataclass(frozen=True)
class Held:
    """An array in memory form: on Auto axes, padded, terms side by side along dim 0.

    Attributes:
        array: What is in memory.
        shape: The logical shape.
        layout: Which axes split each dim and which hold terms.
        mesh: Mesh with Auto axes.
    """

    array: jax.Array
    shape: tuple[int, ...]
    layout: Layout
    mesh: jax.sharding.Mesh

    @property
    def extent(self) -> Extent:
        """Array and mesh as the planner knows them."""
        return extent_of(self.shape, self.array.dtype, self.mesh)


def extent_of(shape: tuple[int, ...], dtype: np.dtype, mesh: jax.sharding.Mesh) -> Extent:
    """Array and mesh as the planner knows them."""
    sizes = tuple((axis, mesh.shape[axis]) for axis in mesh.axis_names)
    return Extent(tuple(shape), jnp.dtype(dtype).itemsize, sizes)


def is_traced(x: object) -> bool:
    """Whether an array is being traced: its values, and with Auto axes its sharding, are not known."""
    return isinstance(x, jax.core.Tracer)


def hold(x: jax.Array | PlacedArray) -> Held:
    """An array that is not traced (or any `PlacedArray`) in memory form; nothing is moved or copied.

    Raises:
        PlacementError: The array does not lie on a mesh.
    """
    if isinstance(x, PlacedArray):
        return Held(x.array, x.shape, x.layout, x.mesh)
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        raise PlacementError(
            f"{type(x).__name__} of shape {getattr(x, 'shape', '?')} does not lie on a mesh: its sharding is "
            f"{sharding}. Place it first with distribute(x, mesh, placements)."
        )
    mesh = auto_twin(sharding.mesh)  # pyright: ignore[reportArgumentType]
    layout = spec_to_layout(sharding.spec, x.ndim, mesh)
    target = NamedSharding(mesh, layout_to_spec(stack_axes(layout)))
    if target == sharding:
        return Held(x, x.shape, layout, mesh)
    stacked = stacked_shape(extent_of(x.shape, x.dtype, mesh), layout)
    return Held(_relabel(x, stacked, target), x.shape, layout, mesh)


def release(held: Held, mesh: jax.sharding.Mesh) -> jax.Array | PlacedArray:
    """The inverse of `hold`: a plain array on `mesh` where its sharding can say all, else a `PlacedArray`."""
    layout, extent = held.layout, held.extent
    even = all(extent.is_even(dim, axes) for dim, axes in enumerate(layout.dims))
    if not even or any(op != "sum" for _, op in layout.partial):
        return PlacedArray(held.array, held.shape, layout, held.mesh)
    if is_traced(held.array):  # no relabelling inside jit
        return PlacedArray(held.array, held.shape, layout, held.mesh) if layout.partial else held.array
    target = NamedSharding(explicit_twin(mesh) if layout.partial else mesh, layout_to_spec(layout))
    return held.array if target == held.array.sharding else _relabel(held.array, held.shape, target)


def stack_axes(layout: Layout) -> Layout:
    """The layout of what is in memory: partial axes split dim 0, outermost."""
    if not layout.partial:
        return layout
    first, *rest = layout.dims or ((),)
    return Layout(((*layout.partial_axes, *first), *rest))


def stacked_shape(extent: Extent, layout: Layout) -> tuple[int, ...]:
    """Global shape of what is in memory; a scalar with terms counts as one row for each."""
    local = extent.local_shape(layout) or ((1,) if layout.partial else ())
    axes = stack_axes(layout).dims
    return tuple(length * extent.num_ranks(names) for length, names in zip(local, axes, strict=True))


def add_padding(x: jax.Array, extent: Extent, layout: Layout) -> jax.Array:
    """Logical rows to rows in memory, in global view; padding is zero."""
    for dim, axes in enumerate(layout.dims):
        if not extent.is_even(dim, axes):
            rows = memory_rows(extent.shape[dim], extent.parts(axes))
            x = jnp.take(x, rows, axis=dim, mode="fill", fill_value=0)
    return x


def check_even(extent: Extent, layout: Layout, where: str) -> None:
    """Raise `PlacementError` if a dim would need padding."""
    for dim, axes in enumerate(layout.dims):
        if not extent.is_even(dim, axes):
            parts = " * ".join(f"{axis}={size}" for axis, size in zip(axes, extent.parts(axes), strict=True))
            ranks, size = extent.num_ranks(axes), extent.shape[dim]
            raise PlacementError(
                f"{where}: dim {dim} of shape {extent.shape} has size {size}, which does not divide over {parts} "
                f"({size} = {size // ranks} * {ranks} + {size % ranks}). XLA keeps pieces of one size only. Pass "
                f"pad=True to pad the pieces in memory (the padding is never seen), or choose another dim."
            )


def _relabel(x: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """The same buffers under another global shape and sharding; nothing is moved.

    This is how unreduced arrays, which JAX keeps on Explicit axes with the shape of the whole value, become arrays
    whose terms lie side by side, and back.
    """
    local = sharding.shard_shape(shape)
    pieces = [shard.data.reshape(local) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)
