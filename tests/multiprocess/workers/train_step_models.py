"""The models that test_train_step.py trains in one process and in several, replicated and sharded."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.cp import split_sequence
from jaxpar.ddp import DistributedDataParallel, convert_sync_batchnorm
from jaxpar.fsdp import full_state, fully_shard
from jaxpar.mesh import DeviceMesh, get_rank, get_world_size
from jaxpar.tp import AttentionParallel, ContextParallel, parallelize_module

NUM_STEPS = 3


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(16, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.drop(jnp.tanh(self.hidden(x))))


def waves(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Initial values without random numbers, which take longer to compile; `MLP` draws its own."""
    size = int(np.prod(shape))
    return jnp.sin(1.7 * jnp.arange(1, size + 1, dtype=dtype)).reshape(shape) / shape[0] ** 0.5


class ResNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(
            1, 4, (3, 3), use_bias=False, kernel_init=waves, rngs=rngs
        )  # a bias before BatchNorm has no gradient
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.conv = nnx.Conv(4, 4, (3, 3), kernel_init=waves, rngs=rngs)
        self.out = nnx.Linear(4, 4, kernel_init=waves, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.norm(self.stem(x.reshape(-1, 4, 4, 1))))
        return self.out((x + self.conv(x)).mean((1, 2)))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(1, 16, kernel_init=waves, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=16, decode=False, use_bias=False, kernel_init=waves, rngs=rngs
        )
        self.out = nnx.Linear(16, 4, kernel_init=waves, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.embed(x[:, :, None])
        return self.out((h + self.attention(self.norm(h))).mean(1))


class Decoder(Transformer):
    """Causal, with logits of every position."""

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.embed(x[:, :, None])
        return self.out(h + self.attention(self.norm(h), is_causal=True))


MODELS = {"MLP": MLP, "ResNet": ResNet, "Transformer": Transformer, "Decoder": Decoder}
# (model, microbatches, strategy). BatchNorm sees one microbatch at a time, whose rows are others than on one device.
CASES = (
    ("MLP", 1, "ddp"),
    ("ResNet", 1, "ddp"),
    ("Transformer", 2, "hsdp"),
    ("Transformer", 1, "tp"),
    ("Decoder", 2, "cp"),
)
# Every process compiles every program: with four of them, one case of each kind. The last is fully sharded too.
FEW_CASES = tuple(case for case in CASES if case[0] == "MLP" or case[2] in ("tp", "cp"))


def make_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    weights = np.ones(16, np.float32)
    weights[[2, 5, 6, 7, 15]] = 0.0  # unequal counts per rank
    x = rng.normal(size=(16, 16)).astype(np.float32)
    y, z = rng.integers(0, 4, 16).astype(np.int32), rng.integers(0, 4, (16, 16)).astype(np.int32)
    return {"x": x, "y": y, "z": z, "w": weights}


def loss_fn(model: Any, batch: Any) -> jaxpar.Mean:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return jaxpar.Mean((losses * batch["w"]).sum(), batch["w"].sum())


def sequence_loss_fn(model: Any, batch: Any) -> jaxpar.Mean:
    """Of this rank's part of the positions, whose labels are `z`."""
    x, z = (split_sequence(batch[name], "cp") for name in ("x", "z"))
    losses = optax.softmax_cross_entropy_with_integer_labels(model(x), z).sum(1)
    return jaxpar.Mean((losses * batch["w"]).sum(), batch["w"].sum() * x.shape[1])


def mesh_of(strategy: str, devices: Sequence[jax.Device] | None = None) -> DeviceMesh:
    """All devices: one axis; for hsdp two halves that replicate each other's shards; for tp pairs beside dp.

    For cp it is the outer axis, so that every hop of its ring goes to another process.
    """
    two = min(2, jax.device_count() if devices is None else len(devices))
    shapes = {
        "cp": ((two, -1), ("cp", "dp")),
        "tp": ((-1, two), ("dp", "tp")),
        "hsdp": ((two, -1), ("replica", "dp")),
        "ddp": ((-1,), ("dp",)),
    }
    return jaxpar.init_device_mesh(*shapes[strategy], devices=devices)


def own_rows(whole: dict[str, np.ndarray], strategy: str) -> dict[str, np.ndarray]:
    """This process's rows; processes that share them (tensor and context parallel) feed the same."""
    rank, world = get_rank(), get_world_size()
    position, num_positions = rank, world
    if strategy == "cp" and world > 1:
        num_positions = world // 2
        position = rank % num_positions
    elif strategy == "tp" and world > 1 and jax.local_device_count() == 1:
        position, num_positions = rank // 2, world // 2
    return {name: np.split(x, num_positions)[position] for name, x in whole.items()}


def train(
    name: str, batch: Any, *, accumulate: int, strategy: str, devices: Sequence[jax.Device] | None = None
) -> tuple[list[float], list[np.ndarray]]:
    """Returns the losses of the steps, and all floating variables after them, batch statistics included."""
    mesh = mesh_of(strategy, devices)
    batch_axes = tuple(axis for axis in mesh.axis_names if axis not in ("tp", "cp"))

    def parallelize(model: nnx.Module) -> None:
        if strategy == "tp":
            parallelize_module(model, mesh["tp"], {"attention": AttentionParallel()})
            fully_shard(model, mesh["dp"], units="attention")
            return
        if strategy == "cp":
            parallelize_module(model, mesh["cp"], {"attention": ContextParallel(rotate="ppermute")})
            fully_shard(model, mesh, shard_axis=("cp", "dp"), units="attention")
            return
        if strategy != "ddp":
            fully_shard(model, mesh, units=("attention", "out") if name == "Transformer" else "hidden")
            return
        if isinstance(model, ResNet):
            convert_sync_batchnorm(model, mesh)
        DistributedDataParallel(model, mesh, bucket_bytes=1024, first_bucket_bytes=256)

    model = jaxpar.init_sharded(lambda: MODELS[name](nnx.Rngs(0)), parallelize)
    # An eps above float32's noise in the gradients: g / sqrt(v) of a gradient that is all but zero is noise over noise.
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)
    step = jaxpar.TrainStep(
        sequence_loss_fn if strategy == "cp" else loss_fn,
        model,
        optimizer,
        mesh=mesh,
        batch_axes=batch_axes,
        sequence_axes="cp" if strategy == "cp" else (),
        accumulate=accumulate,
        clip_norm=1.0,
    )
    losses = [float(step(batch)["loss"]) for _ in range(NUM_STEPS)]
    return losses, [x for x in full_state(model).values() if np.issubdtype(x.dtype, np.floating)]
