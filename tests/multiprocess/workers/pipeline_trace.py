"""A pipelined model over processes: two runs of the schedule for each update, on unequal microbatches; evaluated, then traced.

Then one whose stages all use a random key that is assigned anew before each step, by both transports.

argv: a folder for the trace.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.pp import pipeline

jaxpar.init_process_group(timeout_s=60)
mesh = jaxpar.init_device_mesh((jax.device_count(),), ("pp",))
layers = [nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(jax.device_count())]
model = pipeline(nnx.Sequential(*layers), mesh["pp"], n_stages=len(layers), n_microbatches=3)
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
step = jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh, accumulate=2)
x = np.arange(160, dtype=np.float32).reshape(20, 8) / 160
losses = [float(step(x)["loss"]), float(step.evaluate(x)["loss"]), float(step(x)["loss"])]
print("losses", losses, flush=True)
timeline = step.trace(x, Path(sys.argv[1]) / "pp.json", repeats=1)
print("rows", [[str(event.action) for event in row] for row in timeline.events], flush=True)


everywhere, parted = (
    NamedSharding(jaxpar.mesh.as_jax_mesh(mesh), spec) for spec in (PartitionSpec(), PartitionSpec("pp"))
)


class Noisy(nnx.Module):
    """A layer that adds noise, which all layers draw from one key."""

    def __init__(self, key: nnx.Variable[Any]) -> None:
        self.key, self.scale = key, nnx.Param(np.float32(1.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale + jax.random.normal(self.key.get_value(), x.shape[1:])


def train(transport: Any) -> list[float]:
    """Losses of steps with another key each, and the first key again: nothing is learned at a rate of 0."""
    key = nnx.Variable(jax.random.key(0))
    noisy = nnx.Sequential(*[Noisy(key) for _ in layers])
    pipeline(noisy, mesh["pp"], n_stages=len(layers), n_microbatches=2, transport=transport)
    optimizer = nnx.Optimizer(noisy, optax.sgd(0.0), wrt=nnx.Param)
    step = jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), noisy, optimizer, mesh=mesh)
    losses = []
    for seed in (0, 1, 2, 0):
        made = functools.partial(jax.random.key, seed)  # in each process, or on all devices by all processes
        key.set_value(made() if seed != 2 else jax.jit(made, out_shardings=everywhere)())
        losses.append(float(step(x)["loss"]))
    if jax.process_count() > 1:
        key.set_value(
            jax.jit(lambda: jax.random.split(jax.random.key(0), len(layers)), out_shardings=parted)()
        )
        try:
            step(x)
        except ParallelizeError as error:
            assert "layers.0.key was assigned key<fry>[2] on devices" in str(error), error
        else:
            raise AssertionError("an array in parts was taken for a value")
    return losses


transports = ("pull", "permute") if jax.process_count() > 1 else ("auto",)
print("noisy", [train(transport) for transport in transports], flush=True)
