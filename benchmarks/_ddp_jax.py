"""Worker of ddp.py: times jaxpar's step and the hand-written one, or compiles jaxpar's for GPUs that are not here."""

import argparse
import dataclasses
import json

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from _model import TX, ByHand, TransformerConfig, abstract, build, local_batch, loss_fn, medians
from jaxpar.ddp import DistributedDataParallel
from jaxpar.debug import overlap, topology

LARGE = TransformerConfig(
    vocab=4096, width=1024, depth=3, heads=8, kv_heads=8, hidden=4096, dtype=jnp.bfloat16
)


def time_steps(rounds: int) -> dict[str, float]:
    jaxpar.init_process_group()
    mesh = jaxpar.init_device_mesh((jax.device_count(),), ("dp",))
    model = DistributedDataParallel(build(), mesh)
    step = jaxpar.TrainStep(loss_fn, model, nnx.Optimizer(model, TX, wrt=nnx.Param), mesh=mesh)
    by_hand = ByHand(build(), mesh, lambda name, x: NamedSharding(mesh.jax_mesh, PartitionSpec()))
    contenders = {"jaxpar": lambda batch: step(batch)["loss"], "by hand": by_hand}
    return medians(contenders, local_batch(), rounds=rounds)


def overlapped_share(num_devices: int, depth: int) -> dict[str, float]:
    """Share of all-reduced bytes with a matmul between start and done, in the scheduled GPU program."""
    mesh = jaxpar.init_device_mesh((num_devices,), ("dp",), devices=topology("h100", num_devices=num_devices))
    config = dataclasses.replace(LARGE, depth=depth)
    tokens = jax.ShapeDtypeStruct((num_devices, 2049), jnp.int32)
    shares = {}
    for name, options in {
        "buckets": {},
        "one bucket": {"bucket_bytes": 1 << 60, "first_bucket_bytes": 1 << 60},
    }.items():
        model = abstract(config)
        DistributedDataParallel(model, mesh, **options)
        optimizer = nnx.eval_shape(lambda model: nnx.Optimizer(model, TX, wrt=nnx.Param), model)
        step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh)
        shares[name] = overlap(step.lower(tokens).compile(), mesh=mesh).overlapped_fraction
    return shares


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("steps").add_argument("rounds", type=int)
    overlaps = what.add_parser("overlap")
    overlaps.add_argument("num_devices", type=int)
    overlaps.add_argument("depth", type=int)
    args = parser.parse_args()
    measured = (
        time_steps(args.rounds) if args.what == "steps" else overlapped_share(args.num_devices, args.depth)
    )
    print(json.dumps(measured), flush=True)
