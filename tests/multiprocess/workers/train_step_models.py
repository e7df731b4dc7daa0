"""The models that test_train_step.py trains in one process and in several, replicated and sharded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.ddp import DistributedDataParallel, convert_sync_batchnorm
from jaxpar.fsdp import full_state, fully_shard
from jaxpar.mesh import DeviceMesh, get_rank, get_world_size
from jaxpar.tp import AttentionParallel, parallelize_module

NUM_STEPS = 3


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(16, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.drop(jnp.tanh(self.hidden(x))))


class ResNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(
            1, 4, (3, 3), use_bias=False, rngs=rngs
        )  # a bias before BatchNorm has no gradient
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.conv = nnx.Conv(4, 4, (3, 3), rngs=rngs)
        self.out = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.norm(self.stem(x.reshape(-1, 4, 4, 1))))
        return self.out((x + self.conv(x)).mean((1, 2)))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(1, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=16, decode=False, use_bias=False, rngs=rngs
        )
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.embed(x[:, :, None])
        return self.out((h + self.attention(self.norm(h))).mean(1))


MODELS = {"MLP": MLP, "ResNet": ResNet, "Transformer": Transformer}
# (model, microbatches, strategy). BatchNorm sees one microbatch at a time, whose rows are others than on one device.
CASES = (
    ("MLP", 1, "ddp"),
    ("ResNet", 1, "ddp"),
    ("Transformer", 2, "fsdp"),
    ("Transformer", 1, "hsdp"),
    ("Transformer", 1, "tp"),
)
# Every process compiles every program: with four of them, one case of each kind.
FEW_CASES = tuple(case for case in CASES if case[0] == "MLP" or case[2] in ("fsdp", "tp"))


def make_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    weights = np.ones(16, np.float32)
    weights[[2, 5, 6, 7, 15]] = 0.0  # unequal counts per rank
    x = rng.normal(size=(16, 16)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, 4, 16).astype(np.int32), "w": weights}


def loss_fn(model: Any, batch: Any) -> jaxpar.Mean:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return jaxpar.Mean((losses * batch["w"]).sum(), batch["w"].sum())


def mesh_of(strategy: str) -> DeviceMesh:
    """All devices: one axis; for hsdp two halves that replicate each other's shards; for tp pairs beside dp."""
    if strategy == "tp":
        return jaxpar.init_device_mesh((-1, min(2, jax.device_count())), ("dp", "tp"))
    if strategy == "hsdp":
        return jaxpar.init_device_mesh((min(2, jax.device_count()), -1), ("replica", "dp"))
    return jaxpar.init_device_mesh((-1,), ("dp",))


def own_rows(whole: dict[str, np.ndarray], strategy: str) -> dict[str, np.ndarray]:
    """This process's rows; processes that share them (tensor parallel) feed the same."""
    sharers = 2 if strategy == "tp" and jax.local_device_count() == 1 and get_world_size() > 1 else 1
    position, num_positions = get_rank() // sharers, get_world_size() // sharers
    return {name: np.split(x, num_positions)[position] for name, x in whole.items()}


def train(name: str, batch: Any, *, accumulate: int, strategy: str) -> tuple[list[float], list[np.ndarray]]:
    """Returns the losses of the steps, and all floating variables after them, batch statistics included."""
    mesh = mesh_of(strategy)
    batch_axes = tuple(axis for axis in mesh.axis_names if axis != "tp")

    def parallelize(model: nnx.Module) -> None:
        if strategy == "tp":
            parallelize_module(model, mesh["tp"], {"attention": AttentionParallel()})
            fully_shard(model, mesh["dp"], units="attention")
            return
        if strategy != "ddp":
            fully_shard(model, mesh, units=("attention", "out") if name == "Transformer" else "hidden")
            return
        if isinstance(model, ResNet):
            convert_sync_batchnorm(model, mesh)
        DistributedDataParallel(model, mesh, bucket_bytes=1024, first_bucket_bytes=256)

    model = jaxpar.init_sharded(lambda: MODELS[name](nnx.Rngs(0)), parallelize)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    step = jaxpar.TrainStep(
        loss_fn, model, optimizer, mesh=mesh, batch_axes=batch_axes, accumulate=accumulate, clip_norm=1.0
    )
    losses = [float(step(batch)["loss"]) for _ in range(NUM_STEPS)]
    return losses, [x for x in full_state(model).values() if np.issubdtype(x.dtype, np.floating)]
