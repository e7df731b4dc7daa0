"""Values into placed arrays, and placed arrays into the pieces that the devices hold.

    distribute   one whole value            -> array on the mesh         every process has the value; nothing is sent
    from_local   what each device holds     -> array on the mesh         nothing is sent
    to_local     array on the mesh          -> what each device holds    nothing is sent

These three cross between the host and the mesh, so they run outside `jit` (`distribute` inside too). Per-device code
that is compiled and differentiated is `jax.shard_map`.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from jaxpar._errors import PlacementError
from jaxpar.mesh._chunks import piece_lengths
from jaxpar.mesh._init_mesh import MeshLike, as_jax_mesh
from jaxpar.mesh._layout import Layout, auto_twin, layout_to_spec, make_layout, same_devices
from jaxpar.mesh._placed import (
    Held,
    PlacedArray,
    add_padding,
    check_even,
    extent_of,
    hold,
    is_traced,
    release,
    stack_axes,
    stacked_shape,
)
from jaxpar.mesh._placements import Placement
from jaxpar.mesh._plan import Extent


def distribute(
    x: ArrayLike | PlacedArray, mesh: MeshLike, placements: Sequence[Placement], *, pad: bool = False
) -> jax.Array | PlacedArray:
    """Place a whole value on a mesh: each device keeps the part that is its own.

    Every process passes the same value and cuts its own devices' parts from it; nothing is sent between processes.
    PyTorch: `distribute_tensor` with `src_data_rank=None` (row D10). Differentiable, and usable inside `jit`, where
    it becomes a sharding constraint.

    Args:
        x: The whole value: NumPy array, `jax.Array` on one device or replicated, scalar.
        mesh: Mesh or slice; axes of the whole mesh that are not selected replicate.
        placements: One for each axis of `mesh`.
        pad: Allow dims that do not divide; the result is a `PlacedArray`, if one does not.

    Returns:
        The array on the whole mesh. An array that lies so already is returned as it is.

    Raises:
        PlacementError: Wrong placements, `Partial` among them, uneven dims without `pad`, or an array that lies
            otherwise on a mesh already.

    Example:
        >>> from jaxpar.mesh import Shard, init_device_mesh
        >>> x = distribute(np.arange(16.0), init_device_mesh((8,), ("dp",)), [Shard(0)])
        >>> x.sharding.spec[0], x.addressable_shards[1].data
        ('dp', Array([2., 3.], dtype=float32))
    """
    if isinstance(x, PlacedArray):
        raise PlacementError(f"distribute: {x!r} is placed already. Write redistribute(x, placements).")
    whole = as_jax_mesh(mesh)
    shape = np.shape(x)
    layout = make_layout(placements, mesh, len(shape))
    _check_no_partial(layout)
    extent = extent_of(shape, jnp.result_type(x), whole)
    even = all(extent.is_even(dim, axes) for dim, axes in enumerate(layout.dims))
    if not pad:
        check_even(extent, layout, "distribute")
    if even:
        _check_not_elsewhere(x, whole, layout)
        return _put(x, NamedSharding(whole, layout_to_spec(layout)))
    mesh = auto_twin(whole)
    sharding = NamedSharding(mesh, layout_to_spec(layout))
    return PlacedArray(_put(add_padding(jnp.asarray(x), extent, layout), sharding), shape, layout, mesh)


def from_local(
    pieces: Callable[[tuple[int, ...]], ArrayLike] | Sequence[ArrayLike],
    mesh: MeshLike,
    placements: Sequence[Placement],
    *,
    shape: Sequence[int] | None = None,
    check: bool = False,
) -> jax.Array | PlacedArray:
    """Make one array of what each device holds; nothing is sent.

    PyTorch: `DTensor.from_local` (row D11). On axes that replicate, all pieces must be equal; on `Partial` axes they
    are the terms.

    Args:
        pieces: A function of the coordinate on the whole mesh, or one piece for each of this process' devices of the
            mesh, in rank order.
        mesh: Mesh or slice; axes of the whole mesh that are not selected replicate.
        placements: One for each axis of `mesh`.
        shape: Shape of the whole array, needed where pieces differ in size; default the pieces' times the ranks.
        check: Compare the pieces that must be equal, among this process' devices.

    Returns:
        The array; a `PlacedArray` where a dim does not divide or a partial op is not `sum`.

    Raises:
        PlacementError: A piece too few or too many, a piece of the wrong shape or dtype, copies that differ under
            `check`, a mean of integers.

    Example:
        >>> from jaxpar.mesh import Partial, full_array, init_device_mesh
        >>> mesh = init_device_mesh((8,), ("dp",))
        >>> print(full_array(from_local(lambda rank: jnp.full(2, rank[0]), mesh, [Partial()])))
        [28 28]
    """
    whole = auto_twin(as_jax_mesh(mesh))
    local, coordinates = _local_pieces(pieces, whole)
    layout = make_layout(placements, mesh, local[0].ndim)
    extent = extent_of(_whole_shape(local, layout, whole, shape), local[0].dtype, whole)
    _check_pieces(local, coordinates, layout, extent)
    _check_mean(layout, local[0].dtype)
    if check:
        _check_copies(local, coordinates, layout, whole)
    memory = (*extent.local_shape(layout),) or ((1,) if layout.partial else ())
    devices = [device for device in whole.devices.flat if device.process_index == jax.process_index()]
    buffers = [
        jax.device_put(_grow(piece, memory), device) for piece, device in zip(local, devices, strict=True)
    ]
    sharding = NamedSharding(whole, layout_to_spec(stack_axes(layout)))
    array = jax.make_array_from_single_device_arrays(stacked_shape(extent, layout), sharding, buffers)
    return release(Held(array, extent.shape, layout, whole), as_jax_mesh(mesh))


def to_local(x: jax.Array | PlacedArray) -> tuple[jax.Array, ...]:
    """What each of this process' devices holds, in rank order, padding cut off; nothing is sent.

    PyTorch: `DTensor.to_local` (row D12), which has one device per process and so returns one tensor. For `Partial`
    axes these are the terms.

    Args:
        x: Array on a mesh.

    Returns:
        One single-device array for each of this process' devices of the mesh.

    Raises:
        PlacementError: The array does not lie on a mesh, or is traced.

    Example:
        >>> from jaxpar.mesh import Shard, distribute, init_device_mesh
        >>> to_local(distribute(np.arange(8), init_device_mesh((8,), ("dp",)), [Shard(0)]))[5]
        Array([5], dtype=int32)
    """
    if is_traced(x) or isinstance(x, PlacedArray) and is_traced(x.array):
        raise PlacementError(
            "to_local: inside jit there are no single devices. Write per-device code in jax.shard_map."
        )
    held = hold(x)
    extent, layout = held.extent, held.layout
    by_device = {shard.device: shard.data for shard in held.array.addressable_shards}
    pieces = []
    for place, device in np.ndenumerate(held.mesh.devices):
        if device in by_device:
            real = _real_shape(extent, layout, dict(zip(held.mesh.axis_names, place, strict=True)))
            piece = by_device[device].reshape(extent.local_shape(layout))
            pieces.append(piece if piece.shape == real else piece[tuple(slice(0, length) for length in real)])
    return tuple(pieces)


# Placing.


def _put(x: ArrayLike, sharding: NamedSharding) -> jax.Array:
    """`device_put` that never compares the value over processes (it would be a hidden broadcast)."""
    if is_traced(x):  # inside jit device_put alone is only a hint for the partitioner
        return lax.with_sharding_constraint(jax.device_put(x, sharding), sharding)
    spans_processes = isinstance(x, jax.Array) and not x.is_fully_addressable
    if sharding.is_fully_addressable or spans_processes:
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _check_no_partial(layout: Layout) -> None:
    if layout.partial:
        raise PlacementError(
            f"distribute: Partial on {layout.partial_axes}. A whole value has no terms. Make an array of terms with "
            "from_local(pieces, mesh, placements), or of a placed array with redistribute(x, placements)."
        )


def _check_not_elsewhere(x: ArrayLike, mesh: jax.sharding.Mesh, layout: Layout) -> None:
    sharding = getattr(x, "sharding", None) if isinstance(x, jax.Array) and not is_traced(x) else None
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return
    own = sharding.mesh
    target = NamedSharding(mesh, layout_to_spec(layout))
    if same_devices(own, mesh) and sharding.is_equivalent_to(target, np.ndim(x)):  # pyright: ignore[reportArgumentType]
        return
    raise PlacementError(
        f"distribute: the array lies on a mesh already, as {sharding.spec} over {own}. distribute takes whole values. "
        "Write redistribute(x, placements) to change its placements."
    )


# Pieces.


def _local_pieces(
    pieces: Callable[[tuple[int, ...]], ArrayLike] | Sequence[ArrayLike], mesh: jax.sharding.Mesh
) -> tuple[list[jax.Array], list[dict[str, int]]]:
    """This process' pieces and the coordinate of each on the whole mesh."""
    here = jax.process_index()
    places = [place for place, device in np.ndenumerate(mesh.devices) if device.process_index == here]
    if callable(pieces):
        local = [jnp.asarray(pieces(tuple(int(index) for index in place))) for place in places]
    else:
        local = [jnp.asarray(piece) for piece in pieces]
    if len(local) != len(places):
        raise PlacementError(
            f"from_local: {len(local)} pieces for the {len(places)} devices that this process has in the mesh. Give "
            "one piece for each, in rank order."
        )
    if not local:
        raise PlacementError(
            "from_local: this process has no device in the mesh. Call it where there are some."
        )
    return local, [dict(zip(mesh.axis_names, map(int, place), strict=True)) for place in places]


def _whole_shape(
    local: list[jax.Array], layout: Layout, mesh: jax.sharding.Mesh, shape: Sequence[int] | None
) -> tuple[int, ...]:
    if shape is not None:
        if len(shape) != local[0].ndim:
            raise PlacementError(
                f"from_local: shape {tuple(shape)} has another rank than the pieces, {local[0].shape}."
            )
        return tuple(shape)
    sizes = dict(mesh.shape)
    return tuple(
        length * int(np.prod([sizes[axis] for axis in axes], dtype=int))
        for length, axes in zip(local[0].shape, layout.dims, strict=True)
    )


def _check_pieces(
    local: list[jax.Array], coordinates: list[dict[str, int]], layout: Layout, extent: Extent
) -> None:
    for piece, place in zip(local, coordinates, strict=True):
        real = _real_shape(extent, layout, place)
        if piece.shape != real:
            raise PlacementError(
                f"from_local: the piece at {place} has shape {piece.shape}, but of an array of shape {extent.shape} "
                f"this device holds {real}. Pieces of different sizes need shape=(...), the shape of the whole, and "
                "are cut as torch.chunk cuts: ceil(n / ranks) rows each, the last ones shorter."
            )
        if piece.dtype != local[0].dtype:
            raise PlacementError(
                f"from_local: the piece at {place} is {piece.dtype}, the first one {local[0].dtype}. An array has one "
                "dtype. Convert the pieces first."
            )


def _check_mean(layout: Layout, dtype: np.dtype) -> None:
    if any(op == "avg" for _, op in layout.partial) and not jnp.issubdtype(dtype, jnp.inexact):
        raise PlacementError(
            f"Partial(avg) of {dtype}: a mean of integers is not an integer. Convert the pieces to float, or use "
            'Partial("sum").'
        )


def _check_copies(
    local: list[jax.Array], coordinates: list[dict[str, int]], layout: Layout, mesh: jax.sharding.Mesh
) -> None:
    held = {axis for axes in stack_axes(layout).dims for axis in axes} | set(layout.partial_axes)
    first: dict[tuple[int, ...], tuple[dict[str, int], np.ndarray]] = {}
    for piece, place in zip(local, coordinates, strict=True):
        key = tuple(place[axis] for axis in mesh.axis_names if axis in held)
        value = np.asarray(piece)
        other_place, other = first.setdefault(key, (place, value))
        if not np.array_equal(other, value, equal_nan=value.dtype.kind in "fc"):
            raise PlacementError(
                f"from_local: the pieces at {other_place} and {place} differ, but axes that neither shard nor are "
                "partial hold copies. Name the axis Shard or Partial, or make the pieces equal."
            )


def _real_shape(extent: Extent, layout: Layout, place: dict[str, int]) -> tuple[int, ...]:
    """Shape of a device's piece without padding."""

    def length(dim: int, axes: tuple[str, ...]) -> int:
        parts = extent.parts(axes)
        index = np.ravel_multi_index([place[axis] for axis in axes], parts) if axes else 0
        return piece_lengths(extent.shape[dim], parts)[int(index)]

    return tuple(length(dim, axes) for dim, axes in enumerate(layout.dims))


def _grow(piece: jax.Array, memory: tuple[int, ...]) -> jax.Array:
    """Pad a piece at its end to the shape in memory."""
    if not piece.shape:
        return piece.reshape(memory)
    padding = [(0, there - have) for have, there in zip(piece.shape, memory, strict=True)]
    return jnp.pad(piece, padding) if any(after for _, after in padding) else piece
