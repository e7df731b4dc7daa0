"""Where the arrays of a pipelined model lie: on the whole mesh before its first step, on the devices of their stage after.

mesh (pp 2, dp 2)      f32[8@dp]      on all four devices, copies along pp
stage 1                f32[8@dp]      on the two devices of rank 1
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.mesh._mesh import auto_mesh
from jaxpar.pp._ranks import Ranks, wanted
from jaxpar.pp._relayout import relaid


def stage_mesh(mesh: Mesh, axis: str, rank: int, shape: Mapping[str, int] = MappingProxyType({})) -> Mesh:
    """The devices of one rank of the pipeline, with the other axes of the mesh (one of size 1 if there are none).

    Args:
        mesh: the whole one.
        axis: the pipeline's.
        rank: along it.
        shape: sizes of the other axes, if they are not those of the mesh.
    """
    names = tuple(name for name in mesh.axis_names if name != axis)
    devices = np.take(mesh.devices, [rank], axis=mesh.axis_names.index(axis))
    sizes = [shape.get(name, mesh.shape[name]) for name in names]
    return auto_mesh(devices.reshape(sizes or [1]), names or ("stage",))


def spec_on_stage(x: Any, axis: str, meshes: Sequence[Mesh]) -> PartitionSpec:
    """How an array lies over the axes of a stage; those of size 1 on all of these meshes left out."""

    def live(entry: Any) -> Any:
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        return tuple(n for n in names if n != axis and any(mesh.shape[n] > 1 for mesh in meshes)) or None

    return PartitionSpec(*map(live, x.sharding.spec))


def restricted(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """What an array of the whole mesh has on some of its devices, as an array of those; nothing moves.

    If the axes have other sizes there, it is laid out anew, on these devices alone. Where they all belong to other processes, it is an array that nobody here can read: a name for what is elsewhere.
    """
    as_it_lies = NamedSharding(_shaped_as(x, sharding.mesh), sharding.spec)
    if as_it_lies != sharding:
        return relaid([restricted(x, as_it_lies)], [sharding])[0]
    if x.is_fully_addressable and sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if x.sharding == sharding:
        return x
    parts = {part.device: part.data for part in x.addressable_shards}
    here = [parts[device] for device in sharding.addressable_devices_indices_map(x.shape) if device in parts]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, here, dtype=x.dtype)


def _shaped_as(x: jax.Array, mesh: Any) -> Mesh:
    """A mesh with the sizes that its axes have where an array lies."""
    sizes = x.sharding.mesh.shape if isinstance(x.sharding, NamedSharding) else {}
    shape = [sizes.get(name, size) for name, size in mesh.shape.items()]
    return (
        mesh
        if shape == list(mesh.shape.values())
        else auto_mesh(mesh.devices.reshape(shape), mesh.axis_names)
    )


def onto_whole_mesh(module: nnx.Pytree, mesh: Mesh, axis: str) -> None:
    """Put back, in place, what an earlier step moved to the devices of stages."""
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Variable):
            variable.set_value(on_whole_mesh(variable.get_value(), mesh, axis))


def on_whole_mesh(x: Any, mesh: Mesh, axis: str) -> Any:
    """An array of one stage on all devices, copies along `axis`; anything else as it is.

    If stages lie on several processes, all of them must call it for the same arrays, in one order: it is a broadcast.
    """
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh == mesh:
        return x
    stages = [stage_mesh(mesh, axis, rank) for rank in range(mesh.shape[axis])]
    home = next((stage for stage in stages if _is_reshaped(sharding.mesh, stage)), None)
    if home is None:
        return x
    if home != sharding.mesh:
        x = relaid([x], [NamedSharding(home, sharding.spec)])[0]
    target = NamedSharding(mesh, sharding.spec)
    if target.is_fully_addressable:
        return jax.device_put(x, target)
    return _broadcast(x, stages.index(home), target, axis)


def _is_reshaped(mesh: Any, stage: Mesh) -> bool:
    """Whether a mesh has the axes and devices of another one, in whatever shape."""
    if mesh == stage:
        return True
    is_alike = isinstance(mesh, Mesh) and mesh.axis_names == stage.axis_names
    return is_alike and list(mesh.devices.flat) == list(stage.devices.flat)


def _broadcast(x: jax.Array, root: int, target: NamedSharding, axis: str) -> jax.Array:
    """From one rank of `axis` to all: each gives its part, zeros but for the root's, and takes the root's."""
    kind = jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None
    x = x if kind is None else jax.random.key_data(x)
    parts = {part.device: part.data for part in x.addressable_shards}
    local = target.shard_shape(x.shape)
    size = target.mesh.shape[axis]
    stacked = NamedSharding(target.mesh, PartitionSpec(axis, *target.spec))
    mine = [
        parts[device][None] if device in parts else jax.device_put(np.zeros((1, *local), x.dtype), device)
        for device in stacked.addressable_devices
    ]
    whole = jax.make_array_from_single_device_arrays((size, *x.shape), stacked, mine, dtype=x.dtype)
    result = _row(whole, root, target)
    return result if kind is None else jax.random.wrap_key_data(result, impl=kind)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _row(x: jax.Array, row: int, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x[row], sharding)


class Copies:
    """Copies of arrays on the devices of other ranks, made again only when the value is another one.

    Args:
        ranks: of the pipeline.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: dict[tuple[int, Hashable], tuple[Any, Any]] = {}

    def on(self, rank: int, name: Hashable, x: Any, spec: PartitionSpec) -> Any:
        """`x` on the devices of a rank; itself, if it lies there. All processes must ask, in one order.

        In a process that has no device of that rank, it is `x`.
        """
        sharding = NamedSharding(self._ranks.meshes[rank], spec)
        if x.sharding == sharding:
            return x
        known = self._known.get((rank, name))
        if known is None or known[0] is not x:
            source = self._ranks.meshes.index(x.sharding.mesh)
            what = f"the value of {name} on rank {source}"
            is_key = self._ranks.is_spread and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            like = (
                jax.eval_shape(jax.random.key_data, x) if is_key else x
            )  # between processes only numbers travel
            values = None
            if source in self._ranks.here:
                # Over processes a copy: the optimizer donates the value, perhaps before the other rank has fetched it.
                sent = jax.random.key_data(x) if is_key else x
                values = [jnp.copy(sent) if self._ranks.is_spread else sent]
            arrival = self._ranks.move(values, source, rank, [wanted(like, sharding)], what)
            copy = x if arrival is None else arrival()[0]
            if is_key and arrival is not None:
                copy = jax.random.wrap_key_data(copy, impl=jax.random.key_impl(x))
            self.keep(rank, name, x, copy)
        return self._known[rank, name][1]

    def keep(self, rank: int, name: Hashable, x: Any, copy: Any) -> None:
        """Remember what is a copy of `x` on the devices of a rank."""
        self._known[rank, name] = (x, copy)
