"""Two steps of FSDP, or of a pipeline, or both; prints the losses, and which programs were compiled and which loaded.

argv: rows of the batch, of one after the other with commas; which of fsdp and pipeline, with commas; "die" to be killed at the end of the first attempt, on rank 1.
"""

import json
import os
import signal
import sys

import jax
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.debug import count_compilations
from jaxpar.fsdp import fully_shard
from jaxpar.pp import pipeline


def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def losses(model: nnx.Module, mesh: jaxpar.mesh.DeviceMesh, x: np.ndarray, **options: str) -> list[str]:
    optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(loss, model, optimizer, mesh=mesh, **options)
    return [float(step(x)["loss"]).hex() for _ in range(2)]


def make_model() -> nnx.Sequential:
    layers = [nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(jax.device_count())]
    return nnx.Sequential(*layers)


def report(num_rows: int, kinds: str) -> None:
    """Trains with this batch."""
    x = np.arange(num_rows * 8, dtype=np.float32).reshape(num_rows, 8) / 100
    found = {}
    with count_compilations() as programs:
        if "fsdp" in kinds:
            mesh = jaxpar.init_device_mesh((jax.device_count(),), ("dp",))
            share = num_rows // jax.process_count()
            mine = x[jax.process_index() * share :][:share]
            found["fsdp"] = losses(fully_shard(make_model(), mesh), mesh, mine, batch_axes="dp")
        if "pipeline" in kinds:
            mesh = jaxpar.init_device_mesh((jax.device_count(),), ("pp",))
            stages = pipeline(make_model(), mesh["pp"], n_stages=jax.device_count(), n_microbatches=2)
            found["pipeline"] = losses(stages, mesh, x)
    print(json.dumps({"losses": found, "compiled": programs.names, "loaded": programs.loaded}), flush=True)


jaxpar.init_process_group(timeout_s=60)
for num_rows in map(int, sys.argv[1].split(",")):
    report(num_rows, sys.argv[2])
jaxpar.mesh.barrier("trained", timeout_s=60)
if sys.argv[3:] == ["die"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and jax.process_index() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
