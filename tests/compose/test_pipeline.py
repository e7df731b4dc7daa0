"""Pipelined in every composition, by either executor: pp with dp, fsdp, tp, and all three, equal to one device in float64.

    stage 0    embedding, attention            on pp rank 0, over dp and tp as without a pipeline
    stage 1    MLP, tied embedding, loss       on pp rank 1; the residual stream crosses too

A unit of fully_shard is never cut: there stage 1 begins with the block. Dropout, clipping, AdamW and weights that differ between microbatches are on. The reference is the same step on one device.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.ddp import DistributedDataParallel
from jaxpar.fsdp import fully_shard
from jaxpar.mesh import init_device_mesh
from jaxpar.pp import pipeline
from jaxpar.tp import parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from tiny import Transformer, loss_fn, plan

NUM_STEPS = 3
RTOL = 1e-12
BETWEEN_UNITS: dict[str, Any] = {"blocks.0": "beginning"}
WITHIN_BLOCK: dict[str, Any] = {"blocks.0.attention": "end"}


@pytest.fixture(autouse=True, scope="module")
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def ddp(model: Any, mesh: Any) -> None:
    DistributedDataParallel(model, mesh["dp"])


def fsdp(model: Any, mesh: Any) -> None:
    fully_shard(model, mesh["dp"], units="blocks.*")


def hsdp(model: Any, mesh: Any) -> None:
    fully_shard(model, mesh["replica", "dp"], shard_axis="dp", replicate_axis="replica", units="blocks.*")


def tp(model: Any, mesh: Any) -> None:
    parallelize_module(model, mesh["tp"], plan())


def sp(model: Any, mesh: Any) -> None:
    parallelize_module(model, mesh["tp"], plan(is_sequence_parallel=True))


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, what is done to the model before `pipeline`, and a schedule."""

    axes: dict[str, int]
    wraps: tuple[Callable[[Any, Any], None], ...]
    schedule: str = "1F1B"
    executor: Any = "mpmd"
    is_unsharded: bool = False

    @property
    def split(self) -> dict[str, Any]:
        has_units = fsdp in self.wraps or hsdp in self.wraps
        return BETWEEN_UNITS if has_units else WITHIN_BLOCK

    def __str__(self) -> str:
        names = (*(wrap.__name__ for wrap in self.wraps), self.schedule, self.executor)
        return "-".join((*names, "gathered_once") if self.is_unsharded else names)


LAYOUTS = [
    Layout({"dp": 2, "pp": 2}, (ddp,), "ZBH1"),  # the order of the axes does not matter
    Layout({"pp": 2, "dp": 4}, (fsdp,), "ZBH1"),
    Layout({"replica": 2, "pp": 2, "dp": 2}, (hsdp,)),
    Layout({"pp": 2, "dp": 1, "tp": 2}, (tp,)),
    Layout({"pp": 2, "dp": 2}, (fsdp,), "ZBH1", is_unsharded=True),
    Layout({"pp": 2, "dp": 2, "tp": 2}, (fsdp, tp), "GPipe"),
    Layout({"pp": 2, "dp": 2, "tp": 2}, (sp, fsdp)),
    Layout({"dp": 2, "pp": 2}, (ddp,), "ZBH1", "spmd"),
    Layout({"pp": 2, "dp": 2, "tp": 2}, (fsdp, tp), "LockStep1F1B", "spmd"),
]


def trained(layout: Layout | None) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """Metrics by name, and all parameters, whole, after the steps."""
    rng = np.random.default_rng(0)
    weights = (rng.uniform(size=(32, 8)) < np.linspace(0.2, 0.9, 32)[:, None]).astype(np.float64)
    batch = {"tokens": rng.integers(0, 16, (32, 9)).astype(np.int32), "weights": weights}
    axes = {"dp": 1} if layout is None else layout.axes
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    mesh = init_device_mesh(tuple(axes.values()), tuple(axes), devices=devices)
    model = Transformer(dropout=0.25)
    model.train()
    for wrap in () if layout is None else layout.wraps:
        wrap(model, mesh)
    if layout is not None:
        options: dict[str, Any] = {
            "schedule": layout.schedule,
            "n_microbatches": 4,
            "executor": layout.executor,
        }
        pipeline(model, mesh["pp"], split_spec=layout.split, **options)
    step = jaxpar.TrainStep(
        loss_fn,
        model,
        nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param),
        mesh=mesh,
        batch_axes=tuple(axis for axis in ("replica", "dp") if axis in axes),
        accumulate=1 if layout is not None else 4,
        accumulate_unsharded=layout is not None and layout.is_unsharded,
        clip_norm=0.1,
    )
    metrics = [step(batch) for _ in range(NUM_STEPS)]
    return (
        {name: [float(m[name]) for m in metrics] for name in metrics[0]},
        [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))],
    )


@functools.cache
def one_device() -> tuple[dict[str, list[float]], list[np.ndarray]]:
    return trained(None)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_pipeline_of_any_layout_equals_one_device(layout: Layout) -> None:
    metrics, params = trained(layout)
    expected_metrics, expected_params = one_device()
    assert metrics.keys() == expected_metrics.keys() == {"loss", "grad_norm"}
    for name, values in metrics.items():
        np.testing.assert_allclose(values, expected_metrics[name], rtol=RTOL, err_msg=name)
    for ours, theirs in zip(params, expected_params, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=RTOL, atol=RTOL)


def test_a_unit_of_fully_shard_is_not_cut() -> None:
    mesh = init_device_mesh((2, 2), ("pp", "dp"), devices=jax.devices()[:4])
    model = Transformer()
    fsdp(model, mesh)
    pipeline(model, mesh["pp"], split_spec=WITHIN_BLOCK, n_microbatches=2)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, batch_axes="dp")
    with pytest.raises(ParallelizeError, match="stage 1 was never reached.* or a unit of fully_shard"):
        step({"tokens": np.ones((4, 9), np.int32), "weights": np.ones((4, 8))})
