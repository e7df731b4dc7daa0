"""Worker of recovery.py: trains until a worker is lost, and says when its first step after that is done."""

import dataclasses
import os

import jax
from flax import nnx

import jaxpar
from _model import SMALL, TX, build, local_batch, loss_fn
from jaxpar.ddp import DistributedDataParallel
from jaxpar.mesh import Recovery, run_recoverable


def train(run: Recovery) -> None:
    """Two steps after a loss; before it, as many as come, each second kept."""
    mesh = jaxpar.init_device_mesh((jax.device_count(),), ("dp",))
    model = DistributedDataParallel(build(dataclasses.replace(SMALL, depth=4)), mesh)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh)
    start, state = run.resume(nnx.state((model, optimizer)))
    nnx.update((model, optimizer), state)
    batch = local_batch()
    for i in range(start, start + 2 if run.restart_count else 1_000_000):
        jax.block_until_ready(step(batch))
        if i == start:
            print("worker", os.getpid(), "from", start, flush=True)
        if (i + 1) % 2 == 0:
            run.keep(i + 1, nnx.state((model, optimizer)))


run_recoverable(train)
