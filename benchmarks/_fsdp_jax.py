"""Worker of fsdp.py: times, counts and compiles jaxpar's sharded step and the hand-written one."""

import argparse
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from _model import (
    TX,
    Block,
    ByHand,
    Transformer,
    TransformerConfig,
    abstract,
    build,
    local_batch,
    loss_fn,
    medians,
    peak_rss_of,
)
from _program import program_facts
from jaxpar.debug import overlap, topology
from jaxpar.fsdp import MixedPrecisionPolicy, fully_shard
from jaxpar.mesh import DeviceMesh

# Every dim divides by 4,096.
LARGE = TransformerConfig(vocab=4096, width=4096, heads=32, kv_heads=32, hidden=16384, dtype=jnp.bfloat16)
THRESHOLDS = {"0": 0, "64 KiB": 1 << 16, "256 KiB": 1 << 18, "1 MiB": 1 << 20, "all": 1 << 60}


class RematBlock(Block):
    """A block whose backward computes it again: it saves its input only."""

    __call__ = nnx.remat(Block.__call__)


def abstract_remat(config: TransformerConfig) -> Transformer:
    """The model that is compiled for GPUs: what is saved per block does not crowd out what overlaps."""
    model = abstract(dataclasses.replace(config, depth=0))
    blocks = nnx.eval_shape(
        lambda: nnx.List([RematBlock(config, rngs=nnx.Rngs(0)) for _ in range(config.depth)])
    )
    model.blocks = blocks
    return model


class Ours:
    """jaxpar's step; every block is a unit, and the rest of the model is one."""

    def __init__(self, mesh: DeviceMesh, **options: Any) -> None:
        model = fully_shard(build(), mesh, units="blocks.*", **options)
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        self._step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh)
        self.lower = self._step.lower

    def __call__(self, batch: Any) -> jax.Array:
        return self._step(batch)["loss"]


def by_hand(model: Transformer, mesh: DeviceMesh, **options: Any) -> ByHand:
    """Parameters and state sharded along the dims that `fully_shard` chooses."""

    def place(name: str, x: Any) -> NamedSharding:
        divides = [dim for dim, size in enumerate(x.shape) if size % mesh.size() == 0]
        dim = 0 if 0 in divides else max(divides, key=lambda dim: x.shape[dim], default=None)
        spec = PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "dp")
        return NamedSharding(mesh.jax_mesh, spec)

    return ByHand(model, mesh, place, **options)


def make(name: str, mesh: DeviceMesh) -> Ours | ByHand:
    """A contender: jaxpar's default, jaxpar with parameters kept for the backward, or the hand-written one."""
    if name == "by hand":
        return by_hand(build(), mesh)
    return Ours(mesh, **({"reshard_after_forward": False} if name == "kept" else {}))


def time_steps(rounds: int, names: list[str]) -> dict[str, Any]:
    """The median step of each contender, and what its program communicates and needs."""
    mesh, batch = _mesh(), local_batch()
    steps = {name: make(name, mesh) for name in names}
    seconds = medians(steps, batch, rounds=rounds)
    return {
        name: {"step_s": seconds[name], **program_facts(step.lower(batch).compile(), mesh)}
        for name, step in steps.items()
    }


def time_thresholds(rounds: int) -> dict[str, float]:
    """The median step for each threshold below which leaves share a flat buffer."""
    mesh = _mesh()
    steps = {name: Ours(mesh, flatten_below_bytes=bound) for name, bound in THRESHOLDS.items()}
    return medians({"default": Ours(mesh), **steps}, local_batch(), rounds=rounds)


def peak_rss(name: str, rounds: int) -> dict[str, int]:
    """The most memory of this process while one contender alone runs steps; compilation is not in it."""
    mesh, batch = _mesh(), local_batch()
    return {"rss_bytes": peak_rss_of(make(name, mesh), batch, rounds=rounds)}


def programs_for_gpus(num_devices: int, depth: int) -> dict[str, Any]:
    """Both steps scheduled for H100s: the share of bytes with a matmul between start and done, and memory.

    Parameters and gradients travel as bfloat16 in both. With half as many tokens, XLA's estimate for 4,096 devices is
    that a block's gather alone takes longer than its backward: then nothing is left to hide its scatter behind.
    """
    mesh = jaxpar.init_device_mesh((num_devices,), ("dp",), devices=topology("h100", num_devices=num_devices))
    config = dataclasses.replace(LARGE, depth=depth)
    rows = NamedSharding(mesh.jax_mesh, PartitionSpec("dp"))
    tokens = jax.ShapeDtypeStruct((16 * num_devices, 1025), jnp.int32, sharding=rows)
    steps = {
        "jaxpar": abstract_step(mesh, config),
        "by hand": by_hand(abstract_remat(config), mesh, compute_dtype=jnp.bfloat16),
    }
    programs = {name: step.lower(tokens).compile() for name, step in steps.items()}
    return {
        name: {"share": overlap(program, mesh=mesh).overlapped_fraction, **program_facts(program, mesh)}
        for name, program in programs.items()
    }


def abstract_step(mesh: DeviceMesh, config: TransformerConfig) -> jaxpar.TrainStep:
    model = abstract_remat(config)
    policy = MixedPrecisionPolicy(param_dtype=jnp.bfloat16)
    fully_shard(model, mesh, units=("embed", "blocks.*"), mp_policy=policy)
    optimizer = nnx.eval_shape(lambda model: nnx.Optimizer(model, TX, wrt=nnx.Param), model)
    return jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh)


def _mesh() -> DeviceMesh:
    jaxpar.init_process_group()
    return jaxpar.init_device_mesh((jax.device_count(),), ("dp",))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    steps = what.add_parser("steps")
    steps.add_argument("rounds", type=int)
    steps.add_argument("names", nargs="+")
    what.add_parser("thresholds").add_argument("rounds", type=int)
    rss = what.add_parser("rss")
    rss.add_argument("name")
    rss.add_argument("rounds", type=int)
    gpus = what.add_parser("gpus")
    gpus.add_argument("num_devices", type=int)
    gpus.add_argument("depth", type=int)
    arguments = vars(parser.parse_args())
    run = {"steps": time_steps, "thresholds": time_thresholds, "rss": peak_rss, "gpus": programs_for_gpus}
    print(json.dumps(run[arguments.pop("what")](**arguments)), flush=True)
