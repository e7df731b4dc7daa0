"""Worker of pipeline.py: a stage in each process. Times steps by schedule and transport, and simulates them with measured costs."""

import argparse
import json
from typing import Any

import jax
from flax import nnx

import jaxpar
from _common import interleave
from _model import TX, build, loss_fn
from _pipeline_jax import CONFIG, SCHEDULES, batch, one_device, wait
from jaxpar.fsdp import fully_shard
from jaxpar.mesh import get_rank, get_world_size
from jaxpar.pp import get_schedule, pipeline, simulate

TRANSPORTS = ("pull", "permute")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int)
    parser.add_argument("microbatches", type=int)
    args = parser.parse_args()
    jaxpar.init_process_group()
    found = (
        alone(args.rounds, args.microbatches)
        if get_world_size() == 1
        else report(args.rounds, args.microbatches)
    )
    if get_rank() == 0:
        print(json.dumps(found), flush=True)


def alone(rounds: int, m: int) -> dict[str, Any]:
    """Seconds of the step on one device."""
    step, tokens = one_device(CONFIG, m), batch(m)
    return {
        "one_device_s": interleave({"one device": lambda: wait(step, tokens)}, rounds=rounds)["one device"]
    }


def report(rounds: int, m: int) -> dict[str, Any]:
    """Seconds of steps by transport and schedule; what the simulator says; and of fully sharded steps."""
    p, tokens = get_world_size(), batch(m)
    steps = {f"{name} {by}": pipelined(name, m, by) for by in TRANSPORTS for name in SCHEDULES}
    sharded, mine = fsdp(), batch(m).reshape(p, -1, *tokens.shape[1:])[get_rank()]
    contenders = {name: lambda step=step: wait(step, tokens) for name, step in steps.items()}
    medians = interleave(contenders | {"fsdp": lambda: wait(sharded, mine)}, rounds=rounds)
    costs = steps["1F1B pull"].measure(tokens, repeats=rounds)
    schedules = {name: get_schedule(name, p, m) for name in SCHEDULES}
    return {
        "step_s": {by: {name: medians[f"{name} {by}"] for name in SCHEDULES} for by in TRANSPORTS},
        "simulated_s": {name: simulate(schedule, costs).makespan for name, schedule in schedules.items()},
        "fsdp_s": medians["fsdp"],
        "latency_us": costs.latency * 1e6,
    }


def pipelined(schedule: str, m: int, transport: Any) -> jaxpar.TrainStep:
    mesh = jaxpar.init_device_mesh((-1,), ("pp",))
    model = pipeline(build(CONFIG), mesh["pp"], schedule=schedule, n_microbatches=m, transport=transport)
    return jaxpar.TrainStep(loss_fn, model, nnx.Optimizer(model, TX, wrt=nnx.Param), mesh=mesh, batch_axes=())


def fsdp() -> jaxpar.TrainStep:
    """The other way to give each device a part of the model: every block gathered when it is used."""
    mesh = jaxpar.init_device_mesh((jax.device_count(),), ("dp",))
    model = fully_shard(build(CONFIG), mesh["dp"], units="blocks.*")
    return jaxpar.TrainStep(
        loss_fn, model, nnx.Optimizer(model, TX, wrt=nnx.Param), mesh=mesh, batch_axes="dp"
    )


if __name__ == "__main__":
    main()
