"""New arrays made on the devices: each makes its own part only, and random values do not depend on the layout.

    normal(key, (8, 8), mesh, [Shard(0)])      the same numbers as jax.random.normal(key, (8, 8)), on any mesh

Random numbers of one key are a function of the position in the whole array (JAX's partitionable Threefry), so a model
initialised on one device and on a thousand is the same model.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike, DTypeLike

from jaxpar._errors import PlacementError
from jaxpar.mesh._init_mesh import MeshLike, as_jax_mesh
from jaxpar.mesh._layout import Layout, auto_twin, layout_to_spec, make_layout
from jaxpar.mesh._placed import Held, PlacedArray, add_padding, check_even, extent_of, release
from jaxpar.mesh._placements import Placement


def zeros(
    shape: Sequence[int],
    mesh: MeshLike,
    placements: Sequence[Placement],
    *,
    dtype: DTypeLike = jnp.float32,
    pad: bool = False,
) -> jax.Array | PlacedArray:
    """An array of zeros; each device makes its part. PyTorch: `torch.distributed.tensor.zeros` (row D16).

    Args:
        shape: Shape of the whole array.
        mesh: Mesh or slice.
        placements: One for each axis of `mesh`.
        dtype: Element type.
        pad: Allow dims that do not divide; the result is a `PlacedArray`, if one does not.

    Raises:
        PlacementError: Wrong placements, `Partial` among them, or uneven dims without `pad`.

    Example:
        >>> from jaxpar.mesh import Shard, init_device_mesh
        >>> zeros((8, 2), init_device_mesh((8,), ("dp",)), [Shard(0)]).addressable_shards[0].data.shape
        (1, 2)
    """
    return full(shape, 0, mesh, placements, dtype=dtype, pad=pad)


def ones(
    shape: Sequence[int],
    mesh: MeshLike,
    placements: Sequence[Placement],
    *,
    dtype: DTypeLike = jnp.float32,
    pad: bool = False,
) -> jax.Array | PlacedArray:
    """An array of ones; arguments as `zeros` (row D16).

    Example:
        >>> from jaxpar.mesh import Shard, init_device_mesh
        >>> print(ones((8,), init_device_mesh((8,), ("dp",)), [Shard(0)]))
        [1. 1. 1. 1. 1. 1. 1. 1.]
    """
    return full(shape, 1, mesh, placements, dtype=dtype, pad=pad)


def empty(
    shape: Sequence[int],
    mesh: MeshLike,
    placements: Sequence[Placement],
    *,
    dtype: DTypeLike = jnp.float32,
    pad: bool = False,
) -> jax.Array | PlacedArray:
    """An array whose values do not matter (JAX has no uninitialised memory: zeros); arguments as `zeros` (row D16).

    Example:
        >>> from jaxpar.mesh import Shard, init_device_mesh
        >>> empty((8,), init_device_mesh((8,), ("dp",)), [Shard(0)]).shape
        (8,)
    """
    return full(shape, 0, mesh, placements, dtype=dtype, pad=pad)


def full(
    shape: Sequence[int],
    value: ArrayLike,
    mesh: MeshLike,
    placements: Sequence[Placement],
    *,
    dtype: DTypeLike | None = None,
    pad: bool = False,
) -> jax.Array | PlacedArray:
    """An array filled with one value; arguments as `zeros`, `dtype` by default the value's (row D16).

    Example:
        >>> from jaxpar.mesh import Shard, init_device_mesh
        >>> print(full((8,), 7, init_device_mesh((8,), ("dp",)), [Shard(0)]))
        [7 7 7 7 7 7 7 7]
    """
    kind = jnp.dtype(jnp.result_type(value) if dtype is None else dtype)
    return _make("full", _fill, (jnp.asarray(value, kind),), shape, mesh, placements, kind, pad=pad)


def normal(
    key: jax.Array,
    shape: Sequence[int],
    mesh: MeshLike,
    placements: Sequence[Placement],
    *,
    dtype: DTypeLike = jnp.float32,
    pad: bool = False,
) -> jax.Array | PlacedArray:
    """Standard normal values, equal to `jax.random.normal(key, shape)` on every mesh and in every layout.

    Each device draws its part only; nothing is sent. PyTorch: `torch.distributed.tensor.randn` (rows D16, D30), whose
    values depend on the mesh.

    Args:
        key: JAX random key, the same on every process.
        shape: Shape of the whole array.
        mesh: Mesh or slice.
        placements: One for each axis of `mesh`.
        dtype: Element type.
        pad: Allow dims that do not divide; the result is a `PlacedArray`, if one does not.

    Raises:
        PlacementError: Wrong placements, `Partial` among them, or uneven dims without `pad`.

    Example:
        >>> from jaxpar.mesh import Shard, init_device_mesh
        >>> key = jax.random.key(0)
        >>> x = normal(key, (8,), init_device_mesh((8,), ("dp",)), [Shard(0)])
        >>> bool((x == jax.random.normal(key, (8,))).all())
        True
    """
    return _make("normal", _normal, (key,), shape, mesh, placements, jnp.dtype(dtype), pad=pad)


def uniform(
    key: jax.Array,
    shape: Sequence[int],
    mesh: MeshLike,
    placements: Sequence[Placement],
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    pad: bool = False,
) -> jax.Array | PlacedArray:
    """Uniform values in [low, high), equal to `jax.random.uniform` in every layout; arguments as `normal`.

    Example:
        >>> from jaxpar.mesh import Shard, init_device_mesh
        >>> key = jax.random.key(0)
        >>> x = uniform(key, (8,), init_device_mesh((8,), ("dp",)), [Shard(0)])
        >>> bool((x == jax.random.uniform(key, (8,))).all())
        True
    """
    kind = jnp.dtype(dtype)
    bounds = (jnp.asarray(low, kind), jnp.asarray(high, kind))
    return _make("uniform", _uniform, (key, *bounds), shape, mesh, placements, kind, pad=pad)


# Making them.


def _fill(shape: tuple[int, ...], dtype: np.dtype, value: jax.Array) -> jax.Array:
    return jnp.full(shape, value, dtype)


def _normal(shape: tuple[int, ...], dtype: np.dtype, key: jax.Array) -> jax.Array:
    return jax.random.normal(key, shape, dtype)


def _uniform(
    shape: tuple[int, ...], dtype: np.dtype, key: jax.Array, low: jax.Array, high: jax.Array
) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, low, high)


def _make(
    name: str,
    values: Callable[..., jax.Array],
    arguments: tuple[jax.Array, ...],
    shape: Sequence[int],
    mesh: MeshLike,
    placements: Sequence[Placement],
    dtype: np.dtype,
    *,
    pad: bool,
) -> jax.Array | PlacedArray:
    sizes = tuple(int(size) for size in shape)
    whole = as_jax_mesh(mesh)
    layout = make_layout(placements, mesh, len(sizes))
    if layout.partial:
        raise PlacementError(
            f"{name}: Partial on {layout.partial_axes}. A new value has no terms. Use Shard and Replicate, or "
            "from_local to make an array of terms."
        )
    if not pad:
        check_even(extent_of(sizes, dtype, whole), layout, name)
    mesh = auto_twin(whole) if pad else whole
    return release(Held(_maker(values, sizes, dtype, mesh, layout)(*arguments), sizes, layout, mesh), mesh)


@lru_cache(maxsize=1024)
def _maker(
    values: Callable[..., jax.Array],
    shape: tuple[int, ...],
    dtype: np.dtype,
    mesh: jax.sharding.Mesh,
    layout: Layout,
) -> Callable[..., jax.Array]:
    extent = extent_of(shape, dtype, mesh)

    def make(*arguments: jax.Array) -> jax.Array:
        return add_padding(values(shape, dtype, *arguments), extent, layout)

    return jax.jit(make, out_shardings=NamedSharding(mesh, layout_to_spec(layout)))
