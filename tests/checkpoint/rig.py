"""One small model in five layouts: what a checkpoint is saved from and restored into.

one         1 device
zero1       dp=2              replicated parameters, sharded optimizer state
fsdp        dp=4              sharded parameters; `scale`, which no dim divides, is stored flat and padded
fsdp-tp     dp=2 tp=2         both on the same arrays
pipeline    pp=2 dp=2 tp=2    stages on devices of their own, each sharded
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.ddp import DistributedDataParallel
from jaxpar.fsdp import full_state, fully_shard, shard_optimizer_state
from jaxpar.mesh import DeviceMesh, init_device_mesh
from jaxpar.pp import pipeline
from jaxpar.tp import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, ROWS = 8, 8
SIZES = {
    "one": {"dp": 1},
    "zero1": {"dp": 2},
    "fsdp": {"dp": 4},
    "fsdp-tp": {"dp": 2, "tp": 2},
    "pipeline": {"pp": 2, "dp": 2, "tp": 2},
}


class Block(nnx.Module):
    """A residual MLP with a parameter that no number of devices divides, and dropout."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (3, 5)))
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.down(jax.nn.gelu(self.up(x))) * jnp.tanh(self.scale[...]).mean()
        return x + self.dropout(y)


class Model(nnx.Module):
    """Two blocks: the two stages of the pipeline."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model: Model, batch: Mapping[str, jax.Array]) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def batch(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([5, step])
    return {name: rng.normal(size=(ROWS, WIDTH)).astype(np.float32) for name in "xy"}


@dataclass
class Run:
    """A model, its optimizer and its step, on a mesh."""

    model: Model
    optimizer: nnx.Optimizer
    step: jaxpar.TrainStep
    mesh: DeviceMesh

    def train(self, first: int, last: int) -> list[float]:
        """Losses of the steps after `first` up to `last`, which their number gives their batch."""
        return [float(self.step(self.batch(i))["loss"]) for i in range(first + 1, last + 1)]

    def batch(self, step: int) -> dict[str, Any]:
        """The global batch, on the mesh, whatever process asks."""
        spec = jax.sharding.NamedSharding(self.mesh.jax_mesh, jax.sharding.PartitionSpec("dp"))
        place = lambda x: jax.make_array_from_callback(x.shape, spec, lambda i: x[i])  # noqa: E731
        return {name: place(x) for name, x in batch(step).items()}

    def state(self) -> dict[str, np.ndarray]:
        """Everything, on the host, by name."""
        parts = {"model": full_state(self.model), "optimizer": full_state(self.optimizer)}
        return {f"{part}.{name}": x for part, found in parts.items() for name, x in found.items()}


def run(layout: str, *, seed: int = 0, devices: Any = None) -> Run:
    """Builds a layout of `SIZES`; the same seed, the same values."""
    sizes = SIZES[layout]
    mesh = init_device_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        devices=(devices or jax.devices())[: int(np.prod([*sizes.values()]))],
    )
    model = Model(rngs=nnx.Rngs(seed))
    if "tp" in sizes:
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
    if layout == "zero1":
        DistributedDataParallel(model, mesh["dp"])
    elif layout != "one":
        fully_shard(model, mesh["dp"], units="blocks.*", pad_above_bytes=0)
    if "pp" in sizes:
        pipeline(model, mesh["pp"], split_spec={"blocks.1": "beginning"}, n_microbatches=2)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    if layout == "zero1":
        shard_optimizer_state(optimizer, mesh["dp"])
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, batch_axes="dp")
    return Run(model, optimizer, step, mesh)
