"""Plain JAX under the launcher: it finds its place by itself, and a failed rank ends the others in a collective."""

import re
import time

from jaxpar_launch import launch

PSUM = """
import sys, time
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.distributed.initialize()
n = jax.device_count()
mesh = jax.make_mesh((n,), ("x",), axis_types=(AxisType.Auto,))
psum = jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
ones = jax.make_array_from_callback((n,), NamedSharding(mesh, P("x")), lambda index: np.ones(1, np.float32))
total = float(psum(ones)[0])
print("rank", jax.process_index(), "of", jax.process_count(), "devices", jax.local_device_count(), "sum", total, flush=True)
if "fail" in sys.argv:
    if jax.process_index() == 1:
        raise ValueError(f"boom at {time.time()}")
    while True:
        psum(ones).block_until_ready()
"""


def test_initialize_without_arguments_and_a_sum_over_two_processes_of_two_devices(script) -> None:
    result = launch(script(PSUM), nproc=2, devices_per_proc=2, timeout_s=60).check()
    for rank in (0, 1):
        assert f"rank {rank} of 2 devices 2 sum 4.0" in result.output[rank]


TORCHRUN_STYLE = """
import os
import jax
from jax.experimental import multihost_utils

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
jax.distributed.initialize(address, num_processes=world_size, process_id=rank)
ranks = multihost_utils.process_allgather(jax.numpy.asarray(jax.process_index()))
print("local rank", os.environ["LOCAL_RANK"], "of", jax.process_count(), "sees", ranks.tolist())
"""


def test_a_script_that_reads_torchruns_variables_only(script) -> None:
    result = launch(script(TORCHRUN_STYLE), nproc=2, timeout_s=60).check()
    for rank in (0, 1):
        assert f"local rank {rank} of 2 sees [0, 1]" in result.output[rank]


def test_an_exception_in_one_rank_ends_the_other_in_its_collective_and_is_blamed(script) -> None:
    path = script(PSUM)
    result = launch([path, "fail"], nproc=2, timeout_s=60)
    ended = time.time()
    assert result.exit_code == 1
    assert [failure.rank for failure in result.failures][0] == 1
    message = result.failures[0].message
    assert message is not None and message.startswith("ValueError: boom at ")
    assert ended - float(message.rpartition(" ")[2]) < 5
    line = 1 + PSUM[: PSUM.index("raise ValueError")].count("\n")
    assert f"at {path}:{line}" in result.report
    assert re.search(r"^  0 .* (stopped|exit code|signal)", result.report, re.M), result.report
