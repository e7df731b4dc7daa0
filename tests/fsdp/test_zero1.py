"""ZeRO-1 (row O2): replicated parameters, sharded optimizer state, equal to one device, and what it moves."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.ddp import DistributedDataParallel, bf16_compress_hook
from jaxpar.debug import assert_collectives
from jaxpar.fsdp import fully_shard, shard_optimizer_state, sharding_report
from jaxpar.mesh import DeviceMesh, init_device_mesh

NUM_STEPS = 3
SHARDED_BYTES = 4 * (4 * 8 + 8 + 8 * 8 + 8 * 3)  # all but the last bias of 3
LEFT_BYTES = 4 * 3
# In the order of the backward: [outer.kernel], [middle kernel], [inner.bias and inner.kernel].
BUCKETS = {"first_bucket_bytes": 64, "bucket_bytes": 256}
EACH_ALONE = BUCKETS | {"flatten_below_bytes": 1}


class Model(nnx.Module):
    """A tied kernel, and a bias of 3 that no axis divides."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.middle = nnx.List([nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(2)])
        self.middle[1].kernel = self.middle[0].kernel
        self.outer = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.inner(x))
        for layer in self.middle:
            x = jnp.tanh(layer(x))
        return self.outer(x)


def loss_fn(model: Any, batch: Any) -> jaxpar.Mean:
    losses = ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)
    return jaxpar.Mean((losses * batch["w"]).sum(), batch["w"].sum())


def make_optimizer(model: Any) -> nnx.Optimizer:
    return nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def mesh_of(*shape: int, axes: tuple[str, ...] = ("dp",)) -> DeviceMesh:
    return init_device_mesh(shape, axes, devices=jax.devices()[: int(np.prod(shape))])


def bytes_on_first_device(optimizer: nnx.Optimizer) -> int:
    arrays = jax.tree.leaves(nnx.state(optimizer, nnx.OptVariable))
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (16, 4), "y": (16, 3)}
    rows = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return rows | {"w": np.arange(16, dtype=np.float32)}


@pytest.fixture(scope="module")
def reference(batch: dict[str, np.ndarray]) -> tuple[list[float], list[jax.Array]]:
    model = Model()
    optimizer = make_optimizer(model)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: loss_fn(m, batch).value)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, batch)) for _ in range(NUM_STEPS)]
    return losses, jax.tree.leaves(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    ("num_ranks", "ddp", "accumulate", "scatters"),
    [(1, BUCKETS, 1, 0), (2, BUCKETS, 1, 3), (4, None, 1, 1), (4, EACH_ALONE, 1, 4), (4, BUCKETS, 2, 3)],
)
def test_zero1_equals_one_device_and_moves_slices(
    num_ranks: int, ddp: Any, accumulate: int, scatters: int, batch: Any, reference: Any
) -> None:
    mesh = mesh_of(num_ranks)
    model = DistributedDataParallel(Model(), mesh["dp"], **ddp) if ddp else Model()
    optimizer = shard_optimizer_state(make_optimizer(model), mesh["dp"])
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, accumulate=accumulate)
    # The all-reduce beside the loss's is of the bias whose state is not sharded.
    counts: dict[Any, int] = {
        ("all_reduce", "dp"): 2,
        ("reduce_scatter", "dp"): scatters,
        ("all_gather", "dp"): scatters,
    }
    moved: dict[Any, int] = {("reduce_scatter", "dp"): SHARDED_BYTES, ("all_gather", "dp"): SHARDED_BYTES}
    if num_ranks == 1:
        counts, moved = {}, {}
    assert_collectives(step, batch, expected=counts, bytes=moved, mesh=mesh)

    losses = [float(step(batch)["loss"]) for _ in range(NUM_STEPS)]

    np.testing.assert_allclose(losses, reference[0], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(nnx.state(model, nnx.Param)), reference[1], strict=True):
        assert ours.sharding.is_fully_replicated
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert bytes_on_first_device(optimizer) == 2 * (SHARDED_BYTES // num_ranks + LEFT_BYTES)


def test_state_sharded_over_one_of_two_batch_axes_sums_slices_over_the_other(
    batch: Any, reference: Any
) -> None:
    mesh = mesh_of(2, 2, axes=("replica", "dp"))
    model = DistributedDataParallel(Model(), mesh)
    optimizer = shard_optimizer_state(make_optimizer(model), mesh["dp"])
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, batch_axes=("replica", "dp"))
    counts = {
        ("all_reduce", ("replica", "dp")): 2,  # the loss, the bias
        ("reduce_scatter", "dp"): 1,
        ("all_reduce", "replica"): 1,
        ("all_gather", "dp"): 1,
    }
    assert_collectives(
        step, batch, expected=counts, bytes={("all_reduce", "replica"): SHARDED_BYTES // 2}, mesh=mesh
    )
    for _ in range(NUM_STEPS):
        step(batch)
    for ours, theirs in zip(jax.tree.leaves(nnx.state(model, nnx.Param)), reference[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def abstract(tx: Any, parallelize: Any = lambda model: model) -> tuple[Any, Any]:
    model = nnx.eval_shape(Model)
    parallelize(model)
    return model, nnx.eval_shape(lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param), model)


def test_what_is_not_sharded_is_listed_with_its_reason_and_abstract_optimizers_are_taken() -> None:
    _, optimizer = abstract(optax.adamw(1e-2))
    assert shard_optimizer_state(optimizer, mesh_of(4)) is optimizer
    rows = {row.name: row for row in sharding_report(optimizer).rows if ".mu." in row.name}
    assert rows["opt_state.0.mu.outer.bias"].reason == "no dim of [3] divides by 4"
    assert rows["opt_state.0.mu.outer.kernel"].num_parts == 4


def test_the_state_of_a_sharded_model_has_nothing_to_shard() -> None:
    mesh = mesh_of(4)
    model = fully_shard(Model(), mesh)
    with pytest.raises(
        ParallelizeError, match=re.escape("fully_shard follows its parameters, so there is nothing")
    ):
        shard_optimizer_state(make_optimizer(model), mesh)


def test_sharding_twice_is_refused_and_so_is_an_optimizer_without_state() -> None:
    _, optimizer = abstract(optax.adamw(1e-2))
    shard_optimizer_state(optimizer, mesh_of(4))
    with pytest.raises(ParallelizeError, match=re.escape("is sharded over 'dp' already")):
        shard_optimizer_state(optimizer, mesh_of(4))
    with pytest.raises(ParallelizeError, match=re.escape("keeps no array per parameter")):
        shard_optimizer_state(abstract(optax.sgd(0.1))[1], mesh_of(4))


def test_a_hook_that_would_be_bypassed_is_refused() -> None:
    mesh = mesh_of(4)
    model, optimizer = abstract(
        optax.adamw(1e-2), lambda m: DistributedDataParallel(m, mesh, comm_hook=bf16_compress_hook)
    )
    shard_optimizer_state(optimizer, mesh)
    with pytest.raises(ParallelizeError, match=re.escape("comm_hook=bf16_compress_hook")) as caught:
        jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh)
    assert "inner.bias are reduce-scattered" in str(caught.value)


def test_state_over_an_axis_that_does_not_split_the_batch_is_refused() -> None:
    mesh = mesh_of(2, 4, axes=("dp", "tp"))
    model, optimizer = abstract(optax.adamw(1e-2))
    shard_optimizer_state(optimizer, mesh["tp"])
    with pytest.raises(ParallelizeError, match=re.escape("is sharded over ('tp',)")) as caught:
        jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, batch_axes="dp")
    assert "shard_optimizer_state(optimizer, mesh['dp'])" in str(caught.value)
