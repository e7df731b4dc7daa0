"""The norm of gradients counts each element once (rows Q1, Q2, Q4, W17): sharded, replicated, padded, tied, sliced."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.debug import collectives
from jaxpar.fsdp import fully_shard, shard_optimizer_state
from jaxpar.mesh import DeviceMesh, init_device_mesh
from jaxpar.train import clip_grad_norm, total_norm

MAX_NORM = 0.25


class Model(nnx.Module):
    """A tied kernel; one of [5, 7], which is stored flat and padded; a bias of 7, which is whole on every device."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.blocks[1].kernel = self.blocks[0].kernel
        self.narrow = nnx.Linear(8, 5, use_bias=False, rngs=rngs)
        self.odd = nnx.Linear(5, 7, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.odd(self.narrow(x))


def loss_fn(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(8, width)).astype(np.float32) for name, width in (("x", 8), ("y", 7))}


@pytest.fixture(scope="module")
def gradients(batch: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Of one device, each shared parameter once."""
    graphdef, params = nnx.split(Model())
    grads = jax.grad(lambda params: loss_fn(nnx.merge(graphdef, params), batch))(params)
    return [np.asarray(g) for g in jax.tree.leaves(grads)]


def fsdp(model: Any, mesh: DeviceMesh) -> nnx.Optimizer:
    fully_shard(model, mesh, units="blocks.*", pad_above_bytes=128)
    return kept(model)


def zero1(model: Any, mesh: DeviceMesh) -> nnx.Optimizer:
    return shard_optimizer_state(kept(model), mesh)


def nothing(model: Any, mesh: DeviceMesh) -> nnx.Optimizer:
    del mesh
    return kept(model)


def kept(model: Any) -> nnx.Optimizer:
    """An optimizer whose state is the (clipped) gradients."""
    return nnx.Optimizer(model, optax.trace(0.0), wrt=nnx.Param)


DP, BOTH = ("dp",), ("replica", "dp")
# Of the all-reduces over some axes: how many arrays, and bytes. A scalar loss is 4 bytes, the norm is 4 more.
FSDP = {DP: (3, 4 + 4 + 4 * 7)}  # the last: the bias of 7
HSDP = {BOTH: (2, 4 + 4 * 7), DP: (1, 4), ("replica",): (1, 4 * (8 * 8 + 2 * 8 + 8 * 5 + 36) // 2)}
ZERO1 = {DP: (3, 4 + 4 + 4 * (7 + 5 * 7))}
DDP = {DP: (2, 4 + 4 * (8 * 8 + 2 * 8 + 8 * 5 + 5 * 7 + 7))}  # whole gradients: their norm needs nobody


@pytest.mark.parametrize(
    ("parallelize", "shape", "norm_type", "all_reduces"),
    [
        (fsdp, (4,), 1.0, FSDP),
        (fsdp, (4,), 2.0, FSDP),
        (fsdp, (4,), math.inf, FSDP),
        (fsdp, (2, 2), 2.0, HSDP),
        (fsdp, (2, 2), math.inf, HSDP),
        (fsdp, (1,), 2.0, {}),
        (zero1, (2,), 2.0, ZERO1),
        (nothing, (2,), 2.0, DDP),
    ],
)
def test_the_norm_is_that_of_one_device_and_costs_one_number_on_the_wire(
    parallelize: Any, shape: Any, norm_type: float, all_reduces: Any, batch: Any, gradients: Any
) -> None:
    mesh = init_device_mesh(shape, BOTH[-len(shape) :], devices=jax.devices()[: math.prod(shape)])
    model = Model()
    optimizer = parallelize(model, mesh)
    step = jaxpar.TrainStep(
        loss_fn,
        model,
        optimizer,
        mesh=mesh,
        batch_axes=mesh.axis_names,
        clip_norm=MAX_NORM,
        clip_norm_type=norm_type,
    )
    rows = [row for row in collectives(step, batch, mesh=mesh) if row.kind == "all_reduce"]
    found = {row.axes: [r for r in rows if r.axes == row.axes] for row in rows}
    moved = {
        axes: (sum(r.num_operands for r in same), sum(r.bytes for r in same)) for axes, same in found.items()
    }
    assert moved == all_reduces

    norm = float(step(batch)["grad_norm"])

    expected = np.linalg.norm(np.concatenate([g.ravel() for g in gradients]), norm_type)
    assert expected > MAX_NORM
    np.testing.assert_allclose(norm, expected, rtol=1e-5)
    clipped = jax.tree.leaves(nnx.state(optimizer, nnx.OptVariable))
    for ours, theirs in zip(clipped, gradients, strict=True):
        whole = np.asarray(ours).ravel()[: theirs.size].reshape(theirs.shape)
        np.testing.assert_allclose(whole, theirs * (MAX_NORM / expected), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_in_global_view_is_right_on_sharded_arrays(norm_type: float) -> None:
    mesh = init_device_mesh((2, 4), ("replica", "dp"))
    specs = jax.sharding.PartitionSpec("dp"), jax.sharding.PartitionSpec(None, "replica")
    arrays = [np.arange(-20.0, 12.0, dtype=np.float32).reshape(8, 4) for _ in specs]
    placed = [
        jax.device_put(x, jax.sharding.NamedSharding(mesh.jax_mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]
    grads = {"placed": placed, "whole": jnp.ones(3), "empty": jnp.ones((0, 2))}
    expected = np.linalg.norm(np.concatenate([*(x.ravel() for x in arrays), np.ones(3)]), norm_type)
    np.testing.assert_allclose(total_norm(grads, norm_type=norm_type), expected, rtol=1e-6)
    clipped, norm = clip_grad_norm(grads, 1.0, norm_type=norm_type)
    np.testing.assert_allclose(norm, expected, rtol=1e-6)
    np.testing.assert_allclose(total_norm(clipped, norm_type=norm_type), 1.0, rtol=1e-5)
    assert clipped["placed"][0].sharding == placed[0].sharding


def test_a_norm_type_below_one_is_refused_when_the_step_is_built() -> None:
    mesh = init_device_mesh((1,), ("dp",), devices=jax.devices()[:1])
    model = nnx.eval_shape(Model)
    optimizer = nnx.eval_shape(kept, model)
    with pytest.raises(ParallelizeError, match="norm_type must be at least 1"):
        jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, clip_norm=1.0, clip_norm_type=0.5)
