"""Joins, then rank 1 fails in the way named by the argument while rank 0 waits in a collective for ever."""

import os
import signal
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.mesh import barrier, full_array, init_device_mesh, warm_up

how = sys.argv[1]
jaxpar.init_process_group(timeout_s=30, shutdown_timeout_s=2)
mesh = init_device_mesh((2,), ("dp",))
warm_up(mesh)
sharded = jax.make_array_from_callback(
    (8,), NamedSharding(mesh.jax_mesh, P("dp")), lambda i: np.arange(8.0)[i]
)
barrier("both are ready")
if jax.process_index() == 0:
    print(full_array(sharded))  # a collective read that rank 1 never joins
elif how == "raises":
    raise ValueError("no data here")
elif how == "SIGTERM":
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
# how == "ends": rank 1 reaches the end of the script
