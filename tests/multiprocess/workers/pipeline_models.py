"""Pipelines over processes, and the same model on one device: tied embedding, mask, a skip over all blocks, dropout."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.fsdp import full_state, fully_shard
from jaxpar.pp import gathered, get_schedule, pipeline

sys.path.insert(0, str(Path(__file__).parents[2] / "pp"))
from pipeline_rig import Model, batch_of, loss_fn

ROWS, NUM_MICROBATCHES, NUM_STEPS = 8, 4, 3


@dataclass(frozen=True)
class Case:
    """A layout.

    Args:
        axes: sizes of the mesh's axes, in order.
        schedule: its name; none: not pipelined, on one device.
        transport: how activations travel.
        stages_per_rank: how many.
        executor: walks the grid, or compiles it into one program.
    """

    axes: tuple[tuple[str, int], ...]
    schedule: str | None = None
    transport: Any = "auto"
    stages_per_rank: int = 1
    executor: Any = "mpmd"

    @property
    def name(self) -> str:
        mesh = "-".join(f"{axis}{size}" for axis, size in self.axes)
        return f"{mesh}-{self.schedule}-{self.stages_per_rank}-{self.transport}-{self.executor}"


ONE_DEVICE = Case((("dp", 1),))


def cases(world_size: int, num_devices: int) -> list[Case]:
    """What so many processes train."""
    return {
        # one process for each rank, two stages each
        (2, 2): [Case((("pp", 2),), "ZBVZeroBubble", "permute", 2)],
        # two devices each; a stage in one process, by either executor, and one that spans both
        (2, 4): [
            Case((("pp", 2), ("dp", 2)), "1F1B", "pull"),
            Case((("pp", 2), ("dp", 2)), "1F1B", executor="spmd"),
            Case((("dp", 2), ("pp", 2)), "1F1B"),
        ],
    }[world_size, num_devices]


def train(case: Case) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """Metrics by name, and all parameters, whole, after the steps."""
    names, shape = zip(*case.axes, strict=True)
    devices = jax.devices()[:1] if case.schedule is None else None
    mesh = jaxpar.init_device_mesh(shape, names, devices=devices)
    model = Model(3)
    model.train()
    sizes = dict(case.axes)
    if "dp" in sizes and case.schedule is not None:
        fully_shard(model, mesh["dp"], units=["embed", "blocks.*"])
    if case.schedule is not None:
        schedule = get_schedule(
            case.schedule, sizes["pp"], NUM_MICROBATCHES, stages_per_rank=case.stages_per_rank
        )
        splits: Any = dict.fromkeys(SPLITS[schedule.n_stages], "beginning")
        pipeline(
            model,
            mesh["pp"],
            split_spec=splits,
            schedule=schedule,
            transport=case.transport,
            executor=case.executor,
        )
    optimizer = nnx.Optimizer(model, optax.chain(optax.adamw(1e-2), times_loss()), wrt=nnx.Param)
    step = jaxpar.TrainStep(
        loss_fn,
        model,
        optimizer,
        mesh=mesh,
        batch_axes="dp" if "dp" in sizes else (),
        accumulate=1 if case.schedule is not None else NUM_MICROBATCHES,
        clip_norm=0.1,
    )
    metrics = [step(own_rows(mesh)) for _ in range(NUM_STEPS)]
    with gathered(model, mesh):
        params = list(full_state(model).values())
    return {name: [float(m[name]) for m in metrics] for name in metrics[0]}, params


def times_loss() -> optax.GradientTransformationExtraArgs:
    """An optimizer that looks at the loss, on every stage."""

    def update(updates: Any, state: Any, params: Any = None, *, value: jax.Array, **_: Any) -> Any:
        return jax.tree.map(lambda x: x * value, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


SPLITS = {2: ["blocks.1"], 4: ["blocks.0", "blocks.1", "blocks.2"]}


def own_rows(mesh: Any) -> dict[str, np.ndarray]:
    """The rows of this process's devices."""
    whole = batch_of(ROWS)
    num = mesh.shape[mesh.axis_names.index("dp")] if "dp" in mesh.axis_names else 1
    places = sorted(
        {
            place[mesh.axis_names.index("dp")] if "dp" in mesh.axis_names else 0
            for place, device in np.ndenumerate(jaxpar.mesh.as_jax_mesh(mesh).devices)
            if device.process_index == jax.process_index()
        }
    )
    return {name: np.concatenate([np.split(x, num)[place] for place in places]) for name, x in whole.items()}
