"""argv: what rank 1 does otherwise, one after the other: `nothing`, `options`, `program`, `shapes`, `mesh`.

Prints each DesyncError under a line `CASE <name>`, with its time.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar._errors import DesyncError
from jaxpar.mesh import barrier, get_rank


def train(odd: str) -> None:
    """Rank 0 does the usual, whatever is odd on the other."""
    odd = odd if get_rank() == 1 else ""
    devices = jax.devices()[::-1] if odd == "mesh" else jax.devices()
    mesh = jaxpar.init_device_mesh((-1,), ("dp",), devices=devices)
    width = 3 if odd == "shapes" else 2

    def loss_fn(model: nnx.Module, x: jax.Array) -> jax.Array:
        return (model(x) ** 2).mean() * (2.0 if odd == "program" else 1.0)

    model = nnx.Linear(width, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, clip_norm=2.0 if odd == "options" else 1.0)
    step(np.ones((2, width), jnp.float32))


jaxpar.init_process_group()
for case in sys.argv[1:]:
    barrier(f"both are at {case}", timeout_s=30)
    print("CASE", case)
    start_s = time.monotonic()
    try:
        train(case)
        print("no error")
    except DesyncError as error:
        print(f"after {time.monotonic() - start_s:.1f} s: {error}")
