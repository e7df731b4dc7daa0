"""The second rank of a pipeline goes wrong in its second step; the first one must say for what it waited.

argv: how it goes wrong ("sleeps", "other_shape"), and the transport.
"""

import os
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.mesh import get_rank

how, transport = sys.argv[1:]
# The other one waits longer: it must still be there when the first gives up.
jaxpar.init_process_group(timeout_s=8 if os.environ["RANK"] == "0" else 20)
mesh = jaxpar.init_device_mesh((2,), ("pp",))
model = nnx.Sequential(*[nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2)])
jaxpar.pp.pipeline(model, mesh["pp"], n_stages=2, n_microbatches=2, transport=transport)
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
step = jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh, batch_axes=())
jax.block_until_ready(step(np.ones((4, 4), np.float32)))
rows = 4
if get_rank() == 1:
    if how == "sleeps":
        time.sleep(30)
    rows = 8
step(np.ones((rows, 4), np.float32))
