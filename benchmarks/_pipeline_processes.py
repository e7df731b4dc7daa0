"""Worker of pipeline.py: a stage or two in each process. Times steps, and simulates them with measured costs."""

import argparse
import json
from typing import Any

import jax
from flax import nnx

import jaxpar
from _common import interleave
from _model import TX, build, loss_fn
from _pipeline_jax import batch, config_of, one_device, wait
from jaxpar.fsdp import fully_shard
from jaxpar.mesh import get_rank, get_world_size
from jaxpar.pp import get_schedule, pipeline, simulate

STAGES_PER_RANK = {"GPipe": 1, "1F1B": 1, "ZBH1": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}
PERMUTED = ("GPipe", "1F1B")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int)
    parser.add_argument("microbatches", type=int)
    parser.add_argument("blocks", type=int, help="of the model, on one device")
    parser.add_argument("--stages-per-rank", type=int, default=2, help="leave out schedules with more")
    args = parser.parse_args()
    jaxpar.init_process_group()
    if get_world_size() == 1:
        found = alone(args.rounds, args.microbatches, args.blocks)
    else:
        found = report(args.rounds, args.microbatches, args.stages_per_rank)
    if get_rank() == 0:
        print(json.dumps(found), flush=True)


def alone(rounds: int, m: int, blocks: int) -> dict[str, Any]:
    """Seconds of the step on one device."""
    step, tokens = one_device(config_of(blocks), m), batch(m)
    return {
        "one_device_s": interleave({"one device": lambda: wait(step, tokens)}, rounds=rounds)["one device"]
    }


def report(rounds: int, m: int, most_stages: int) -> dict[str, Any]:
    """Seconds of steps by transport and schedule; what the simulator says; and of fully sharded steps."""
    p, tokens = get_world_size(), batch(m)
    names = [name for name, stages in STAGES_PER_RANK.items() if stages <= most_stages]
    steps = {("pull", name): pipelined(name, m, "pull") for name in names}
    steps |= {("permute", name): pipelined(name, m, "permute") for name in PERMUTED}
    sharded, mine = fsdp(), batch(m).reshape(p, -1, *tokens.shape[1:])[get_rank()]
    contenders: Any = {key: lambda step=step: wait(step, tokens) for key, step in steps.items()}
    medians = interleave(contenders | {"fsdp": lambda: wait(sharded, mine)}, rounds=rounds)
    costs = {
        STAGES_PER_RANK[name]: steps["pull", name].measure(tokens, repeats=rounds)
        for name in ("1F1B", "Interleaved1F1B")
        if name in names
    }

    def simulated_s(name: str, number: int) -> float:
        stages = STAGES_PER_RANK[name]
        return simulate(get_schedule(name, p, number, stages_per_rank=stages), costs[stages]).makespan

    return {
        "pull_s": {name: medians["pull", name] for name in names},
        "permute_s": {name: medians["permute", name] for name in PERMUTED},
        "simulated_s": {name: simulated_s(name, m) for name in names},
        # With the same costs: those of another run are those of another minute of this machine.
        "simulated_more_s": {name: (simulated_s(name, 2 * m) - simulated_s(name, m)) / m for name in names},
        "fsdp_s": medians["fsdp"],
    }


def pipelined(schedule: str, m: int, transport: Any) -> jaxpar.TrainStep:
    mesh = jaxpar.init_device_mesh((-1,), ("pp",))
    p = mesh.size("pp")
    model = pipeline(
        build(config_of(p)),
        mesh["pp"],
        n_stages=STAGES_PER_RANK[schedule] * p,
        schedule=schedule,
        n_microbatches=m,
        transport=transport,
    )
    return jaxpar.TrainStep(loss_fn, model, nnx.Optimizer(model, TX, wrt=nnx.Param), mesh=mesh, batch_axes=())


def fsdp() -> jaxpar.TrainStep:
    """The other way to give each device a part of the model: every block gathered when it is used."""
    mesh = jaxpar.init_device_mesh((jax.device_count(),), ("dp",))
    model = fully_shard(build(config_of(jax.device_count())), mesh["dp"], units="blocks.*")
    return jaxpar.TrainStep(
        loss_fn, model, nnx.Optimizer(model, TX, wrt=nnx.Param), mesh=mesh, batch_axes="dp"
    )


if __name__ == "__main__":
    main()
