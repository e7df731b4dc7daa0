"""Runs every row of the process level once and prints what came out as one JSON object: row -> result.

Prints "error: ..." for a row that raised; rows of a world of one and of many are the same.
"""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import mesh as jm
from jaxpar._compat import backend_is_started

rows: dict[str, object] = {}


def row(name):
    """Runs the function and keeps its result, or its error, and how long it took."""

    def run(function):
        start = time.monotonic()
        try:
            rows[name] = function()
        except Exception as error:
            rows[name] = f"error: {type(error).__name__}: {error}"
        rows[f"{name} (s)"] = time.monotonic() - start
        return function

    return run


rows["backend after import"] = backend_is_started()
jaxpar.init_process_group(timeout_s=30, shutdown_timeout_s=10)
rows["backend after init"] = backend_is_started()
rank, world_size = jm.get_rank(), jm.get_world_size()


@row("identity")
def identity():
    return [
        rank,
        world_size,
        jm.get_local_rank(),
        jm.is_initialized(),
        jax.process_index(),
        jax.process_count(),
    ]


@row("init again")
def init_again():
    return jaxpar.init_process_group(timeout_s=30, shutdown_timeout_s=10)


@row("init again otherwise")
def init_again_otherwise():
    jaxpar.init_process_group(preemption=True)


@row("gather")
def gather():
    return jm.all_gather_object({"rank": rank, "array": np.float32(rank)})[-1]["array"].item()


@row("broadcast")
def broadcast():
    return jm.broadcast_object(lambda: f"from {rank}", root=world_size - 1)


@row("root raises")
def root_raises():
    jm.broadcast_object(lambda: 1 / 0)


@row("cannot travel")
def cannot_travel():
    jm.all_gather_object({"a": [object() if rank == world_size - 1 else 0]})


@row("process_allgather")
def process_allgather():
    return jm.process_allgather(np.full(3, rank)).tolist()


@row("barrier")
def barrier():
    jm.barrier("all here", timeout_s=10)


@row("barrier without the last")
def barrier_without_the_last():
    if rank != world_size - 1:
        jm.barrier("not all here", timeout_s=0.5)


@row("another mesh")
def another_mesh():
    jm.assert_same_everywhere("the first step", {"mesh": "dp=2" if rank == 0 else "tp=2", "program": "ab"})


mesh = jm.init_device_mesh((-1,), ("dp",))


@row("warm up")
def warm_up():
    jm.warm_up(mesh)
    jm.warm_up(mesh)


@row("collective")
def collective():
    def body():
        return jax.lax.psum(jax.lax.axis_index("dp") + 1, "dp")

    summed = jax.jit(jax.shard_map(body, mesh=mesh.jax_mesh, in_specs=(), out_specs=P(), check_vma=True))()
    return int(summed)


def whole(sharding_spec):
    """0..7, placed over the mesh."""
    sharding = NamedSharding(mesh.jax_mesh, sharding_spec)
    return jax.make_array_from_callback((8,), sharding, lambda index: np.arange(8.0)[index])


@row("full_array of a sharded array")
def full_sharded():
    return np.asarray(jm.full_array(whole(P("dp")))).tolist()


@row("full_array of a replicated array on rank 0")
def full_replicated():
    array = whole(P())
    return np.asarray(jm.full_array(array)).tolist() if rank == 0 else None


@row("process_allgather of a global array")
def allgather_global():
    return jm.process_allgather(whole(P("dp"))).shape


@row("global batch")
def global_batch():
    from jaxpar.data import global_batch

    batch = global_batch({"x": np.arange(4.0) + 10 * rank}, mesh, ("dp",))["x"]
    return [list(batch.shape), float(jax.jit(jnp.sum)(batch))]


@row("destroy")
def destroy():
    jm.destroy_process_group(timeout_s=10)
    jm.destroy_process_group()
    return jm.is_initialized()


print("ROWS " + json.dumps(rows), flush=True)
