"""An array as the parts that lie on the devices of this process, and back.

rank of a pipeline    devices 0 1 | 2 3, processes 0 | 1      process 1: [part on 2, part on 3]
"""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxpar.mesh._devices import Device


def local_devices(mesh: Mesh) -> list[Device]:
    """The devices of a mesh that belong to this process, in its order."""
    here = jax.process_index()
    return [device for device in mesh.devices.flat if device.process_index == here]


def parts_of(x: jax.Array) -> dict[Device, jax.Array]:
    """The parts of an array that are here."""
    return {shard.device: shard.data for shard in x.addressable_shards}


def joined(like: jax.ShapeDtypeStruct, parts: Sequence[jax.Array]) -> jax.Array:
    """The array whose parts on this process are given."""
    sharding = like.sharding
    assert sharding is not None
    return jax.make_array_from_single_device_arrays(like.shape, sharding, list(parts), dtype=like.dtype)
