"""Worker of ddp.py: times jaxpar's step and the hand-written one, or compiles jaxpar's for GPUs that are not here."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from _common import interleave
from jaxpar.data import global_batch
from jaxpar.ddp import DistributedDataParallel
from jaxpar.debug import overlap, topology
from jaxpar.mesh import get_rank

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from transformer import Transformer, TransformerConfig

ROWS_PER_RANK, TIME = 8, 64
SMALL = TransformerConfig(vocab=256, width=256, depth=2, heads=8, kv_heads=8, hidden=768)
LARGE = TransformerConfig(
    vocab=4096, width=1024, depth=3, heads=8, kv_heads=8, hidden=4096, dtype=jnp.bfloat16
)
TX = optax.adamw(3e-4)


def loss_fn(model: Transformer, tokens_BT: jax.Array) -> jax.Array:
    logits = model(tokens_BT[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BT[:, 1:]).mean()


def build():
    """The model with numbers from NumPy: compiling its random initialisation would take longer than the benchmark."""
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Transformer(SMALL, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    numbers = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.02, x.shape), x.dtype), shapes)
    model = nnx.merge(graphdef, numbers)
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def jaxpar_step(mesh):
    model, optimizer = build()
    DistributedDataParallel(model, mesh)
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh)
    return lambda batch: step(batch)["loss"]


def step_by_hand(mesh):
    """What a JAX user writes: replicated state, a sharded batch, and the partitioner."""
    graphdef, params = nnx.split(build()[0])
    replicated = NamedSharding(mesh.jax_mesh, PartitionSpec())

    def on_mesh(tree):
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, replicated, lambda i: x[i]), tree)

    state = [on_mesh(params), on_mesh(TX.init(params))]

    @jax.jit
    def train(params, opt_state, batch):
        loss, grads = jax.value_and_grad(lambda p: loss_fn(nnx.merge(graphdef, p), batch))(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    train = jax.jit(train, donate_argnums=(0, 1), out_shardings=replicated)

    def step(batch):
        state[0], state[1], loss = train(*state, global_batch(batch, mesh, "dp"))
        return loss

    return step


def time_steps(num_ranks: int, rounds: int) -> dict[str, float]:
    jaxpar.init_process_group()
    mesh = jaxpar.init_device_mesh((num_ranks,), ("dp",))
    rows = ROWS_PER_RANK * jax.local_device_count()
    batch = np.random.default_rng(get_rank()).integers(0, SMALL.vocab, (rows, TIME + 1), dtype=np.int32)
    steps = {"jaxpar": jaxpar_step(mesh), "by hand": step_by_hand(mesh)}
    contenders = {
        name: lambda step=step: jax.block_until_ready(step(batch)) and None for name, step in steps.items()
    }
    return interleave(contenders, rounds=rounds, warmups=2)


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
        model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        DistributedDataParallel(model, mesh, **options)
        optimizer = nnx.eval_shape(lambda model: nnx.Optimizer(model, TX, wrt=nnx.Param), model)
        step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh)
        shares[name] = overlap(step.lower(tokens).compile(), mesh=mesh).overlapped_fraction
    return shares


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["steps", "overlap"])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--depth", type=int, default=4)
    args = parser.parse_args()
    measured = (
        time_steps(args.ranks, args.rounds)
        if args.what == "steps"
        else overlapped_share(args.ranks, args.depth)
    )
    print(json.dumps(measured), flush=True)
