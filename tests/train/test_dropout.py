"""Masks depend on the row of the global batch, also where a device has one row, or one in each microbatch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.mesh import init_device_mesh

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


class Model(nnx.Module):
    """A dropout of rows, and one of something that all rows share."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.shift = nnx.Param(jnp.ones((1, 4)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.of_all = nnx.Dropout(0.5, broadcast_dims=(0,), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.layer(x) + self.of_all(self.shift[...]))


def losses(dp: int, accumulate: int) -> list[float]:
    model: Any = Model()
    model.train()
    mesh = init_device_mesh((dp,), ("dp",), devices=jax.devices()[:dp])
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(
        lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh, accumulate=accumulate
    )
    return [float(step(X)["loss"]) for _ in range(2)]


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    return losses(1, 1)


@pytest.mark.parametrize(("dp", "accumulate"), [(2, 2), (8, 1), (2, 4)])
def test_masks_are_those_of_one_device(dp: int, accumulate: int, one_device: list[float]) -> None:
    np.testing.assert_allclose(losses(dp, accumulate), one_device, rtol=1e-6)
