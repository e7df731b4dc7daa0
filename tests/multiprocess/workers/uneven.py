"""Case DDP-4: w = 0, gradient = x, SGD with rate 1; rank 0 has three batches, rank 1 two. Prints w on each rank."""

import sys
from collections.abc import Iterable

import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.data import join
from jaxpar.mesh import get_rank, init_device_mesh


class Line(nnx.Module):
    """y = w * x, so that dy/dw = x."""

    def __init__(self) -> None:
        self.w = nnx.Param(np.zeros((), np.float32))


def loss_fn(model: Line, batch: dict) -> jaxpar.Mean:
    return jaxpar.Mean((model.w[...] * batch["x"] * batch["mask"]).sum(), batch["mask"].sum())


jaxpar.init_process_group(timeout_s=30, shutdown_timeout_s=3)
mesh = init_device_mesh((2,), ("dp",))
batches = [np.array([x], np.float32) for x in ([1, 1, 1], [3, 3])[get_rank()]]


def train(steps: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    """w after the steps."""
    model = Line()
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, batch_axes=("dp",))
    for x, mask in steps:
        step({"x": x, "mask": mask.astype(np.float32)})
    return float(model.w[...])


if sys.argv[1] == "joined":
    print("W", train(join(batches)), train(join(iter(batches))), flush=True)
else:
    print("W", train((batch, np.ones(1, bool)) for batch in batches), flush=True)
