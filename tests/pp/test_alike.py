"""Stages that run the same programs share them: the program of a schedule does not grow with the number of alike stages."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.pp import pipeline
from jaxpar.pp._spmd._alike import same_program

WIDTH = 8


class Layer(nnx.Module):
    def __init__(self, scale: float, *, rngs: nnx.Rngs) -> None:
        self.linear, self.scale = nnx.Linear(WIDTH, WIDTH, rngs=rngs), scale

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.scale * jax.nn.silu(self.linear(x))


class Chain(nnx.Module):
    def __init__(self, scales: list[float]) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(16, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(scale, rngs=rngs) for scale in scales])
        self.head = nnx.Linear(WIDTH, 16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model: Chain, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def step_of(scales: list[float], n_ranks: int) -> tuple[Chain, jaxpar.TrainStep]:
    """A layer on each rank, or all on one device."""
    mesh = jaxpar.init_device_mesh((n_ranks,), ("pp",), devices=jax.devices()[:n_ranks])
    model = Chain(scales)
    if n_ranks > 1:
        pipeline(model, mesh["pp"], schedule="LockStep1F1B", n_microbatches=2 * n_ranks, executor="spmd")
    return model, jaxpar.TrainStep(
        loss_fn, model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), mesh=mesh
    )


@functools.cache
def num_matmuls(scales: tuple[float, ...]) -> int:
    tokens = jax.ShapeDtypeStruct((2 * len(scales), 5), jnp.int32)
    return step_of(list(scales), len(scales))[1].lower(tokens).as_text().count("dot_general")


def test_the_program_does_not_grow_with_alike_stages() -> None:
    assert num_matmuls((0.5,) * 8) == num_matmuls((0.5,) * 4) == num_matmuls((0.5,) * 3)


def test_stages_with_unlike_constants_have_their_own_programs() -> None:
    forward_and_backward = 3  # matmuls of a layer
    assert num_matmuls((0.5, 0.5, 0.25, 0.5)) == num_matmuls((0.5,) * 4) + forward_and_backward


def test_stages_that_share_programs_train_as_one_device_does() -> None:
    tokens = np.asarray(jax.random.randint(jax.random.key(0), (8, 5), 0, 16))
    (ours, step), (theirs, reference) = step_of([0.5] * 4, 4), step_of([0.5] * 4, 1)
    for _ in range(2):
        np.testing.assert_allclose(step(tokens)["loss"], reference(tokens)["loss"], rtol=1e-5)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (ours, theirs)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (lambda x: jnp.sin(x) * 2.0, True),
        (lambda x: jnp.sin(x) * 3.0, False),
        (lambda x: jnp.cos(x) * 2.0, False),
        (lambda x: 2.0 * jnp.sin(x), False),
        (lambda x: jnp.sin(x).reshape(2, 2).reshape(4) * 2.0, False),
        (lambda x: jnp.sin(x) * jnp.asarray(np.full(4, 2.0, np.float32)), False),
    ],
)
def test_programs_are_the_same_operation_by_operation(
    other: Callable[[jax.Array], jax.Array], is_same: bool
) -> None:
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    mine = jax.make_jaxpr(lambda x: jnp.sin(x) * 2.0)(x)
    assert same_program(mine, jax.make_jaxpr(other)(x)) is is_same


def test_constants_and_loops_are_compared_too() -> None:
    def summed(table: list[float], steps: int) -> object:
        held = np.asarray(table, np.float32)

        def f(x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda c, _: (c * x + held, None), x, length=steps)[0]

        return jax.make_jaxpr(f)(jnp.ones(2))

    assert same_program(summed([1, 2], 3), summed([1, 2], 3))
    assert not same_program(summed([1, 2], 3), summed([1, 4], 3))
    assert not same_program(summed([1, 2], 3), summed([1, 2], 4))
