"""A pipelined model over processes: two runs of the schedule for each update, on unequal microbatches; evaluated, then traced.

argv: a folder for the trace.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import jaxpar
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
