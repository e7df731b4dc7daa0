"""A worker of a job that survives: `_survive_worker.py FOLDER [SECONDS]`: trains, saves every second step, notes every step.

SECONDS is how long a step takes beside its computation, so that something can happen to it.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxpar
from _survive_job import BATCH, EPOCHS, NUM_SAMPLES
from jaxpar.checkpoint import CheckpointManager
from jaxpar.data import DataLoader
from jaxpar.fsdp import fully_shard

WIDTH = 96


def loss_fn(model: nnx.Module, batch: dict[str, jax.Array]) -> jaxpar.Mean:
    errors = ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)
    return jaxpar.Mean((errors * batch["mask"]).sum(), batch["mask"].sum())


def dataset() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(NUM_SAMPLES, WIDTH)).astype(np.float32) for _ in "xy")
    return {"x": x, "y": y, "i": np.arange(NUM_SAMPLES)}


def train(folder: Path, *, pause_s: float = 0.0) -> None:
    """From where the folder's checkpoints stand to the last epoch, or until the job is told to end."""
    mesh = jaxpar.init_device_mesh((-1,), ("dp",))
    model = nnx.Sequential(*[nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(4)])
    fully_shard(model, mesh["dp"], units="layers.*")
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    train_step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh)
    loader = DataLoader(dataset(), BATCH, mesh=mesh, batch_axes="dp")
    with CheckpointManager(folder / "checkpoints", every_steps=2) as manager:
        step, found = 0, manager.restore(model, optimizer)
        if found is not None:
            step = found.step
            loader.load_state_dict(found.data_state)
        with log_file(folder) as log:
            for _ in range(loader.epoch, EPOCHS):
                for batch, mask in loader:
                    metrics = train_step({"x": batch["x"], "y": batch["y"], "mask": mask})
                    step += 1
                    note(log, step, float(metrics["loss"]), batch["i"], mask)
                    time.sleep(pause_s)
                    manager.save(step, model, optimizer, data_state=loader.state_dict())
                    if manager.should_stop:
                        return


def log_file(folder: Path) -> Any:
    """A new file for each attempt and process; attempts are numbered over restarts of launchers too."""
    log = folder / "log"
    log.mkdir(parents=True, exist_ok=True)
    attempt = jaxpar.mesh.broadcast_object(
        lambda: 1 + max((int(p.name.split("-")[0]) for p in log.iterdir()), default=-1)
    )
    return (log / f"{attempt}-{jax.process_index()}.jsonl").open("w")


def note(log: Any, step: int, loss: float, samples: jax.Array, mask: jax.Array) -> None:
    parts = zip(samples.addressable_shards, mask.addressable_shards, strict=True)
    seen = [
        int(i)
        for ids, real in parts
        for i, is_real in zip(np.asarray(ids.data), np.asarray(real.data), strict=True)
        if is_real
    ]
    line = {
        "attempt": int(Path(log.name).name.split("-")[0]),
        "rank": jax.process_index(),
        "world": jax.process_count(),
        "pid": os.getpid(),
        "step": step,
        "loss": loss,
        "samples": seen,
    }
    print(json.dumps(line), file=log, flush=True)


if __name__ == "__main__":
    jaxpar.init_process_group(preemption=True)
    train(Path(sys.argv[1]), pause_s=float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    jaxpar.mesh.destroy_process_group()
