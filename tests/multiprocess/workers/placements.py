"""Placements over processes: prints one JSON object with what this process sees."""

import json

import jax
import numpy as np

import jaxpar
from jaxpar.mesh import (
    Partial,
    Replicate,
    Shard,
    destroy_process_group,
    distribute,
    from_local,
    full_array,
    init_device_mesh,
    normal,
    placements_of,
    redistribute,
    to_local,
)

jaxpar.init_process_group(timeout_s=30)
mesh = init_device_mesh((2, 2), ("dp", "tp"))
value = np.arange(10.0, dtype=np.float32).reshape(5, 2)

padded = distribute(value, mesh, (Shard(0), Shard(1)), pad=True)
terms = from_local(lambda place: np.float32(1 + 2 * place[0] + place[1]), mesh, (Partial(), Partial()))
peaks = from_local(lambda place: value * place[0], mesh, (Partial("max"), Replicate()))
moved = redistribute(padded, (Replicate(), Shard(0)), pad=True)
drawn = normal(jax.random.key(0), (4, 4), mesh, (Shard(0), Shard(0)))

seen = {
    "mesh": repr(mesh),
    "coordinates": mesh.local_coordinates(),
    "padded": [np.asarray(piece).tolist() for piece in to_local(padded)],
    "moved": [np.asarray(piece).tolist() for piece in to_local(moved)],
    "moved whole": np.asarray(full_array(moved)).tolist(),
    "terms": [float(piece) for piece in to_local(terms)],
    "sum": float(full_array(terms)),
    "max": np.asarray(full_array(peaks)).tolist(),
    "placements": [str(place) for place in placements_of(terms)],
    "normal": np.array_equal(full_array(drawn), jax.random.normal(jax.random.key(0), (4, 4))),
}
print("SEEN", json.dumps(seen))
destroy_process_group()
