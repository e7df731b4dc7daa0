"""Worker of launch.py: says that it is there after its first collective, or its first training step; then waits for its end."""

import os
import sys
import time

import jax

import jaxpar


def one_collective() -> None:
    """The mean of a number of each process, as plain JAX has it."""
    mesh = jax.make_mesh((jax.device_count(),), ("dp",))
    place = jax.NamedSharding(mesh, jax.P("dp"))
    ranks = jax.make_array_from_process_local_data(place, jax.numpy.ones(jax.local_device_count()))
    everywhere = jax.NamedSharding(mesh, jax.P())
    jax.block_until_ready(jax.jit(jax.numpy.mean, out_shardings=everywhere)(ranks))


def one_step() -> None:
    """A step of the small transformer under DDP, which takes more than a second to compile."""
    from flax import nnx

    from _model import TX, build, local_batch, loss_fn
    from jaxpar.ddp import DistributedDataParallel

    mesh = jaxpar.init_device_mesh((jax.device_count(),), ("dp",))
    model = DistributedDataParallel(build(), mesh)
    step = jaxpar.TrainStep(loss_fn, model, nnx.Optimizer(model, TX, wrt=nnx.Param), mesh=mesh)
    jax.block_until_ready(step(local_batch()))


jaxpar.init_process_group()
{"collective": one_collective, "step": one_step}[sys.argv[1]]()
os.write(1, f"worker {os.getpid()}\n".encode())  # one write: two workers may share a pipe
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(60)
