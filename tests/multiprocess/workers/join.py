"""Joins the job as told: coordinator address, world size, rank, timeout, and whether rank 1 then raises."""

import sys

import jaxpar
from jaxpar.mesh import all_gather_object, barrier, get_local_rank, get_rank, get_world_size

address, world_size, rank, timeout_s = sys.argv[1:5]
jaxpar.init_process_group(
    coordinator_address=address,
    world_size=int(world_size),
    rank=int(rank),
    timeout_s=float(timeout_s),
    shutdown_timeout_s=10.0,
)
print(f"joined as {get_rank()} of {get_world_size()}: {all_gather_object(get_local_rank())}", flush=True)
if sys.argv[5:] == ["raise"]:
    if get_rank() == 1:
        raise ValueError("no data here")
    barrier("after the failure", timeout_s=2.0)
