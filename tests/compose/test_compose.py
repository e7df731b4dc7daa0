"""The composition suite: one small transformer in every layout, equal to one device in float64.

    layout                   mesh                 what is parallel
    one                      dp=1                 nothing: the reference goes through jaxpar too
    dp2, dp4                 dp=n                 DistributedDataParallel
    dp2-accumulate           dp=2                 the same in two microbatches
    dp2-unit-and-spare-axes  pp=1 dp=2 spare=2    an axis of size 1 costs nothing; over an unused one, replicas agree
    fsdp2, fsdp4             dp=n                 fully_shard: the block and the rest are units
    fsdp2-accumulate         dp=2                 the same in two microbatches, scattered each
    zero2                    dp=4                 the same, parameters kept from forward to backward
    hsdp                     replica=2 dp=2       shards over dp, replicated over replica
    zero1                    dp=4                 replicated parameters, sharded optimizer state
    tp2                      dp=1 tp=2            parallelize_module: columns, then rows
    sp2                      dp=1 tp=2            the same, norms on this rank's part of the sequence
    fsdp2-tp2, fsdp2-sp2     dp=2 tp=2            both on the same parameters
    cp2                      dp=1 cp=2            ring attention, each rank a part of the sequence

Every kind of parallelism adds its rows here. The reference is plain Flax and optax on one device.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.ddp import DistributedDataParallel
from jaxpar.debug import assert_collectives
from jaxpar.fsdp import fully_shard, shard_optimizer_state
from jaxpar.mesh import DeviceMesh, init_device_mesh
from jaxpar.tp import ContextParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from tiny import Transformer, loss_fn, losses_of, plan, sequence_loss_fn

NUM_STEPS = 3
RTOL = 1e-12  # float64; sums in another order differ in the last bits only


def nothing(anything: Any, mesh: DeviceMesh) -> None:
    del anything, mesh


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, what is done to the model, and how many collectives a step then has beside the one for the loss."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    parallelize: Callable[[nnx.Module, DeviceMesh], Any]
    collectives: dict[tuple[str, Any], int]
    accumulate: int = 1
    batch_axes: tuple[str, ...] = ("dp",)
    sequence_axes: tuple[str, ...] = ()
    loss_fn: Callable[[nnx.Module, Any], Any] = loss_fn
    prepare_optimizer: Callable[[nnx.Optimizer, DeviceMesh], Any] = nothing


def ddp(model: nnx.Module, mesh: DeviceMesh) -> None:
    DistributedDataParallel(model, mesh["dp"], bucket_bytes=8192, first_bucket_bytes=2048)


def fsdp(model: nnx.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh["dp"], units="blocks.*")


def zero2(model: nnx.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh["dp"], units="blocks.*", reshard_after_forward=False)


def hsdp(model: nnx.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh, shard_axis="dp", replicate_axis="replica", units="blocks.*")


def tp(model: nnx.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], plan())


def sp(model: nnx.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["tp"], plan(is_sequence_parallel=True))


def fsdp_tp(model: nnx.Module, mesh: DeviceMesh) -> None:
    tp(model, mesh)
    fsdp(model, mesh)


def fsdp_sp(model: nnx.Module, mesh: DeviceMesh) -> None:
    fsdp(model, mesh)
    sp(model, mesh)


def cp(model: nnx.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["cp"], {"**.core": ContextParallel()})


def zero1(optimizer: nnx.Optimizer, mesh: DeviceMesh) -> None:
    shard_optimizer_state(optimizer, mesh["dp"])


# The block is gathered forward and backward, the embedding once; each is scattered once.
FSDP = {("all_gather", "dp"): 3, ("reduce_scatter", "dp"): 2, ("all_reduce", "dp"): 1}
# Forward: embedding, attention, MLP, and the gather of the logits; backward: MLP, attention, and the tied output layer.
TP = {("all_reduce", "tp"): 6, ("all_gather", "tp"): 1}
# Each all-reduce is now a reduce-scatter and, on the other side, an all-gather; one all-reduce for the norm and biases.
SP = {("reduce_scatter", "tp"): 6, ("all_gather", "tp"): 7, ("all_reduce", "tp"): 1}
DDP = {("all_reduce", "dp"): 4}  # three buckets of this model, and the loss
LAYOUTS = (
    Layout("one", (1,), ("dp",), nothing, {}),
    Layout("dp2", (2,), ("dp",), ddp, DDP),
    Layout("dp4", (4,), ("dp",), ddp, DDP),
    # Accumulated gradients are ready all at once: buckets fill in parameter order, which makes one more here.
    Layout("dp2-accumulate", (2,), ("dp",), ddp, {("all_reduce", "dp"): 5}, accumulate=2),
    Layout("dp2-unit-and-spare-axes", (1, 2, 2), ("pp", "dp", "spare"), ddp, DDP),
    Layout("fsdp2", (2,), ("dp",), fsdp, FSDP),
    Layout("fsdp4", (4,), ("dp",), fsdp, FSDP),
    Layout(
        "fsdp2-accumulate",
        (2,),
        ("dp",),
        fsdp,
        {("all_gather", "dp"): 6, ("reduce_scatter", "dp"): 4, ("all_reduce", "dp"): 1},
        accumulate=2,
    ),
    Layout("zero2", (4,), ("dp",), zero2, FSDP | {("all_gather", "dp"): 2}),
    Layout(
        "hsdp",
        (2, 2),
        ("replica", "dp"),
        hsdp,
        {
            ("all_gather", "dp"): 3,
            ("reduce_scatter", "dp"): 2,
            ("all_reduce", "replica"): 1,
            ("all_reduce", ("replica", "dp")): 1,
        },
        batch_axes=("replica", "dp"),
    ),
    Layout(
        "zero1",
        (4,),
        ("dp",),
        nothing,
        {("reduce_scatter", "dp"): 1, ("all_gather", "dp"): 1, ("all_reduce", "dp"): 1},
        prepare_optimizer=zero1,
    ),
    Layout("tp2", (1, 2), ("dp", "tp"), tp, TP),
    Layout("sp2", (1, 2), ("dp", "tp"), sp, SP),
    # Parameters that tp splits and those that it does not travel in a gather each: the block's biases are whole.
    Layout(
        "fsdp2-tp2",
        (2, 2),
        ("dp", "tp"),
        fsdp_tp,
        FSDP | TP | {("all_gather", "dp"): 5, ("reduce_scatter", "dp"): 3},
    ),
    # With sequence parallel all gradients of the block differ over tp until they are summed: they travel together.
    Layout("fsdp2-sp2", (2, 2), ("dp", "tp"), fsdp_sp, FSDP | SP),
    Layout(
        "cp2",
        (1, 2),
        ("dp", "cp"),
        cp,
        # Keys and values gathered, and gathered again; their gradients go home in a hop; all others in one bucket.
        {("all_gather", "cp"): 2, ("collective_permute", "cp"): 1, ("all_reduce", "cp"): 2},
        sequence_axes=("cp",),
        loss_fn=sequence_loss_fn,
    ),
)


@pytest.fixture(autouse=True, scope="module")
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    weights = (rng.uniform(size=(16, 8)) < 0.7).astype(np.float64)
    weights[3] = 0.0  # a row without a valid token
    return {"tokens": rng.integers(0, 16, (16, 9)).astype(np.int32), "weights": weights}


@pytest.fixture(scope="module")
def reference(batch: dict[str, np.ndarray]) -> tuple[list[float], Any]:
    model = Transformer()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        def mean(model):
            return losses_of(model, batch).sum() / batch["weights"].sum()

        loss, grads = nnx.value_and_grad(mean)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, batch)) for _ in range(NUM_STEPS)]
    return losses, nnx.state(model, nnx.Param)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_equals_one_device_and_communicates_as_said(
    layout: Layout, batch: Any, reference: Any
) -> None:
    num_devices = int(np.prod(layout.shape))
    mesh = init_device_mesh(layout.shape, layout.axes, devices=jax.devices()[:num_devices])
    model = jaxpar.init_sharded(Transformer, lambda model: layout.parallelize(model, mesh))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    layout.prepare_optimizer(optimizer, mesh)
    step = jaxpar.TrainStep(
        layout.loss_fn,
        model,
        optimizer,
        mesh=mesh,
        batch_axes=layout.batch_axes,
        sequence_axes=layout.sequence_axes,
        accumulate=layout.accumulate,
    )
    assert_collectives(step, batch, expected=layout.collectives, mesh=mesh)

    losses = [float(step(batch)["loss"]) for _ in range(NUM_STEPS)]

    np.testing.assert_allclose(losses, reference[0], rtol=RTOL)
    for ours, theirs in zip(*map(jax.tree.leaves, (nnx.state(model, nnx.Param), reference[1])), strict=True):
        assert ours.dtype == jnp.float64
        # Adam divides by the root of the squared gradient: an error in the last bits of a tiny one grows.
        np.testing.assert_allclose(ours, theirs, rtol=RTOL, atol=RTOL)
