"""Worker of pipeline.py: times pipelined steps beside the same step on one device, and actions with nothing to compute."""

import argparse
import dataclasses
import json
import os
import time
from typing import Any

import jax
import numpy as np
from flax import nnx

import jaxpar
from _common import interleave
from _model import SMALL, TIME, TX, build, loss_fn
from jaxpar.pp import pipeline
from transformer import TransformerConfig

SCHEDULES = ("GPipe", "1F1B", "ZBH1")
# Nothing to compute: what remains is what Python and the runtime take for an action.
NOTHING = TransformerConfig(vocab=256, width=8, depth=2, heads=1, kv_heads=1, hidden=8)
ROWS = 2  # of a microbatch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int)
    parser.add_argument("microbatches", type=int)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # both devices on one core: before XLA starts its threads
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(json.dumps(report(args.rounds, args.microbatches)))


def report(rounds: int, m: int) -> dict[str, Any]:
    """Seconds of steps, and microseconds of an action with nothing to compute."""
    p = jax.device_count()
    tokens, config = batch(m), config_of(p)
    steps = {name: pipelined(config, name, m) for name in SCHEDULES}
    alone = one_device(config, m)
    contenders = {name: lambda step=step: wait(step, tokens) for name, step in steps.items()}
    medians = interleave(contenders | {"one device": lambda: wait(alone, tokens)}, rounds=rounds)
    idle = pipelined(dataclasses.replace(NOTHING, depth=p), "1F1B", m)
    per_step_s = interleave({"nothing": lambda: wait(idle, tokens)}, rounds=rounds)["nothing"]
    return {
        "step_s": {name: medians[name] for name in SCHEDULES},
        "one_device_s": medians["one device"],
        "action_us": per_step_s * 1e6 / (2 * m * p),
    }


def config_of(p: int) -> TransformerConfig:
    """The small model, with a block for each rank at least."""
    return dataclasses.replace(SMALL, depth=max(4, p))


def batch(m: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SMALL.vocab, (ROWS * m, TIME + 1), dtype=np.int32)


def pipelined(config: TransformerConfig, schedule: str, m: int) -> jaxpar.TrainStep:
    mesh = jaxpar.init_device_mesh((-1,), ("pp",))
    model = pipeline(build(config), mesh["pp"], schedule=schedule, n_microbatches=m)
    return jaxpar.TrainStep(loss_fn, model, nnx.Optimizer(model, TX, wrt=nnx.Param), mesh=mesh)


def one_device(config: TransformerConfig, m: int) -> jaxpar.TrainStep:
    mesh = jaxpar.init_device_mesh((1,), ("dp",), devices=jax.devices()[:1])
    model = build(config)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    return jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, accumulate=m)


def wait(step: jaxpar.TrainStep, tokens: np.ndarray) -> float:
    """Seconds until the step's parameters are there."""
    start_s = time.perf_counter()
    jax.block_until_ready(step(tokens))
    step.block_until_ready()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
