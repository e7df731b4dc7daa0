"""Trains under `run_recoverable`; in each world one more rank is killed.

recovery.py 0 "in a step" 1 "between steps"      world 0 loses rank 0, world 1 loses rank 1, world 2 comes to the end
recovery.py 1 "in a step" folder                 a sharded model, which comes back from checkpoints in the folder
"""

import ctypes
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from recovery_model import NUM_STEPS, initial_weights, make_batch

import jaxpar
from jaxpar._pytree import PyTree
from jaxpar.checkpoint import CheckpointManager
from jaxpar.data import global_batch
from jaxpar.fsdp import full_state, fully_shard
from jaxpar.mesh import Recovery, barrier, get_rank, get_world_size, init_device_mesh, run_recoverable

PLACES, STEPS = sys.argv[2::2], (5, 7)
RANKS = [int(rank) for rank in sys.argv[1::2][: len(PLACES)]]
FOLDER = None if len(sys.argv) % 2 else sys.argv[-1]
EVERY = 2  # keeps after an even number of steps, so the one before the loss is done a second time


class Line(nnx.Module):
    """One linear layer and a random key, which is state too."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.asarray(initial_weights()))
        self.key = nnx.Variable(jax.random.key(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, D] -> [B]."""
        return x @ self.w[...]


def loss_fn(model: Line, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Mean squared error."""
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


def train(run: Recovery) -> str:
    """Called anew in each world."""
    open_files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    print("world", run.restart_count, "pid", os.getpid(), "files", open_files, flush=True)
    mesh = init_device_mesh((jax.device_count(),), ("dp",))
    model = Line()
    if FOLDER is not None:
        fully_shard(model, mesh)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, batch_axes=("dp",))
    manager = None if FOLDER is None else CheckpointManager(FOLDER, every_steps=EVERY, is_async=False)
    start = take_up(run, model, optimizer, manager)
    for i in range(start, NUM_STEPS):
        if run.restart_count < len(RANKS) and i == STEPS[run.restart_count]:
            lose(run)
        rows = [part.reshape(get_world_size(), -1, *part.shape[1:])[get_rank()] for part in make_batch(i)]
        metrics = step(global_batch(tuple(rows), mesh, ("dp",)))
        print("step", i, float(metrics["loss"]).hex(), flush=True)
        if manager is not None:
            manager.save(i + 1, model, optimizer)
        elif (i + 1) % EVERY == 0:
            run.keep(i + 1, nnx.state((model, optimizer)))
    return np.asarray(full_state(model)["w"]).tobytes().hex()


def take_up(run: Recovery, model: Line, optimizer: nnx.Optimizer, manager: CheckpointManager | None) -> int:
    """From a survivor, else from a checkpoint; the number of steps done."""

    def load() -> tuple[int, PyTree]:
        found = None if manager is None else manager.restore(model, optimizer)
        return 0 if found is None else found.step, nnx.state((model, optimizer))

    steps, state = run.resume(nnx.state((model, optimizer)), otherwise=load)
    nnx.update((model, optimizer), state)
    return steps


def lose(run: Recovery) -> None:
    """Where everybody is when one rank is killed."""
    place, is_lost = PLACES[run.restart_count], get_rank() == RANKS[run.restart_count]
    if place == "in a step":
        if is_lost:
            die()
        return  # the others enter the step and wait for it there
    barrier("all have come")
    if is_lost:
        die()
    if place == "while stuck":
        ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock: no thread, no signal handler runs
    while True:
        time.sleep(0.01)
        run.check()


def die() -> None:
    """As the kernel ends a process that has no memory."""
    os.kill(os.getpid(), signal.SIGKILL)


print("weights", run_recoverable(train), flush=True)
