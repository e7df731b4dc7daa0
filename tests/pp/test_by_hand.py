"""PP3: stages by hand are what they are on one device, and a pipeline cuts between them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.pp import PipelineStages, pipeline, plan_of

VOCAB, WIDTH = 8, 4


pytestmark = pytest.mark.usefixtures("float64")


class First(nnx.Module):
    """Gives the next stage two values: the hidden state, and what a later one skips to."""

    def __init__(self) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        self.mix = nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.float64, rngs=nnx.Rngs(1))

    def __call__(self, tokens: jax.Array, *, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = self.embed(tokens)
        return jnp.tanh(self.mix(x)) * mask[..., None], x


class Last(nnx.Module):
    """Uses the embedding of the first stage."""

    def __init__(self, embed: nnx.Embed) -> None:
        self.mix = nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.float64, rngs=nnx.Rngs(2))
        self.embed = embed

    def __call__(self, x: jax.Array, skip: jax.Array, *, mask: jax.Array) -> jax.Array:
        return self.embed.attend(jnp.tanh(self.mix(x)) * mask[..., None] + skip)


def make() -> PipelineStages:
    first = First()
    return PipelineStages([first, Last(first.embed)])


def loss_fn(model: Any, batch: Any) -> jaxpar.Mean:
    logits = model(batch["tokens"], mask=batch["mask"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
    return jaxpar.Mean((losses * batch["mask"]).sum(), batch["mask"].sum())


BATCH = {
    "tokens": np.arange(24).reshape(6, 4) % VOCAB,
    "mask": (np.arange(24).reshape(6, 4) % 5 < 3).astype(np.float64),
}


def test_stages_by_hand_equal_one_device() -> None:
    mesh = jaxpar.init_device_mesh((2,), ("pp",), devices=jax.devices()[:2])
    model, alone = make(), make()
    pipeline(model, mesh["pp"], n_microbatches=3)
    tx = optax.adam(1e-2)
    step = jaxpar.TrainStep(loss_fn, model, nnx.Optimizer(model, tx, wrt=nnx.Param), mesh=mesh)
    optimizer = nnx.Optimizer(alone, tx, wrt=nnx.Param)
    for _ in range(2):
        loss, grads = nnx.value_and_grad(lambda m: loss_fn(m, BATCH).value)(alone)
        optimizer.update(alone, grads)
        np.testing.assert_allclose(step(BATCH)["loss"], loss, rtol=1e-12)
    ours, theirs = (jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, alone))
    assert len(ours) == len(theirs) == 5  # the embedding once
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_they_may_be_cut_in_another_way() -> None:
    mesh = jaxpar.init_device_mesh((2,), ("pp",), devices=jax.devices()[:2])
    layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(4)]
    plan = plan_of(pipeline(PipelineStages(layers), mesh["pp"], n_stages=2, n_microbatches=2))
    assert plan is not None and plan.splits == (("stages.2", "beginning"),)
    plan = plan_of(pipeline(PipelineStages(layers), mesh["pp"], schedule="ZBV", n_microbatches=4))
    assert plan is not None and plan.schedule.n_stages == 4


def test_what_are_no_stages() -> None:
    layer: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    function: Any = jnp.tanh
    with pytest.raises(ParallelizeError, match="there is no stage. Write"):
        PipelineStages([])
    with pytest.raises(ParallelizeError, match=r"stages\[1\] is a .*, and a stage is an nnx.Module"):
        PipelineStages([layer, function])
    with pytest.raises(
        ParallelizeError, match=r"stages\[0\] and stages\[1\] are one Linear.*stages\[1\].kernel = st"
    ):
        PipelineStages([layer, layer])
    mesh = jaxpar.init_device_mesh((2,), ("pp",), devices=jax.devices()[:2])
    with pytest.raises(ParallelizeError, match="3 stages do not divide among 2 ranks"):
        pipeline(
            PipelineStages([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(3)]),
            mesh["pp"],
            n_microbatches=2,
        )
