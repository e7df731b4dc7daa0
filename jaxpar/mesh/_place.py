"""Puts arrays on a mesh without changing where they already lie on it.

already a NamedSharding of this mesh     kept
anything else (one device, NumPy)        replicated; over several processes, process 0's values everywhere
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.mesh._fingerprint import assert_same_everywhere


def place(values: list[Any], mesh: jax.sharding.Mesh) -> list[Any]:
    """Returns the arrays on `mesh`; abstract ones (`jax.ShapeDtypeStruct`) get the sharding only.

    Over several processes this is a collective call: what does not lie on the mesh yet is broadcast from process 0.
    """
    elsewhere = [i for i, x in enumerate(values) if not _lies_on(x, mesh)]
    out, replicated = list(values), NamedSharding(mesh, PartitionSpec())
    concrete = [i for i in elsewhere if not isinstance(values[i], jax.ShapeDtypeStruct)]
    for i, x in zip(concrete, _replicate([values[i] for i in concrete], replicated), strict=True):
        out[i] = x
    for i in set(elsewhere) - set(concrete):
        out[i] = jax.ShapeDtypeStruct(values[i].shape, values[i].dtype, sharding=replicated)
    return out


def put(x: Any, sharding: NamedSharding) -> Any:
    """The array in a new place, in buffers of its own; an abstract one gets the sharding only."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(place([x], sharding.mesh)[0], sharding)  # pyright: ignore[reportArgumentType]


def _lies_on(x: Any, mesh: jax.sharding.Mesh) -> bool:
    own = getattr(x, "sharding", None)
    return isinstance(own, NamedSharding) and own.mesh == mesh


def _replicate(values: list[jax.Array], sharding: NamedSharding) -> list[jax.Array]:
    if not values:
        return []
    if jax.process_count() == 1:
        # A copy, always: the step donates its buffers, and the caller may still hold the original. In two steps, as
        # replication shares the original's buffer whatever `may_alias` says (jax 0.10.2 to 0.12.0).
        copies = [
            jax.device_put(x, x.sharding, may_alias=False) if isinstance(x, jax.Array) else x for x in values
        ]
        return jax.device_put(copies, sharding)
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in values]
    shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in values)
    assert_same_everywhere("placing arrays on a mesh", {"mesh": str(sharding.mesh), "arrays": shapes})
    raw = [np.asarray(jax.random.key_data(x) if key else x) for x, key in zip(values, is_key, strict=True)]
    raw = multihost_utils.broadcast_one_to_all(raw)
    arrays = [
        jax.make_array_from_callback(np.shape(x), sharding, lambda i, x=x: np.asarray(x)[i]) for x in raw
    ]
    return [
        jax.random.wrap_key_data(x, impl=jax.random.key_impl(old)) if key else x
        for x, old, key in zip(arrays, values, is_key, strict=True)
    ]
