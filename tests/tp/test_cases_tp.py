"""Bugs reported of other tensor-parallel code, as tests: cases.md section 4, TP-1, TP-2, TP-5 and TP-6."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.mesh import Replicate, Shard, full_array, init_device_mesh
from jaxpar.tp import (
    AttentionParallel,
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

SPLIT_INSIDE = PrepareModuleInputOutput(
    input_layouts=Replicate(),
    desired_input_layouts=Shard(1),
    output_layouts=Shard(1),
    desired_output_layouts=Replicate(),
)


def mesh_of(dp: int, tp: int) -> Any:
    return init_device_mesh((dp, tp), ("dp", "tp"), devices=jax.devices()[: dp * tp])


def trained(
    model: Any, mesh: Any, loss_fn: Any, batch: Any, *, num_steps: int = 1, lr: float = 1.0
) -> list[float]:
    optimizer = nnx.Optimizer(model, optax.sgd(lr), wrt=nnx.Param)
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, batch_axes="dp")
    return [float(step(batch)["loss"]) for _ in range(num_steps)]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("scattered", [False, True])
def test_tp_1_the_bias_of_a_row_split_layer_counts_once(num_ranks: int, scattered: bool) -> None:
    """W = ones, bias 100: y = num_ranks + 100, and the gradient of the bias is that of one device."""
    mesh = mesh_of(1, num_ranks)

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(num_ranks, 1, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
            self.layer.bias.set_value(jnp.array([100.0]))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layer(x)

    output = Shard(1) if scattered else Replicate()
    plan = {"layer": RowwiseParallel(input_layouts=Replicate(), output_layouts=output)}
    model = parallelize_module(Model(), mesh["tp"], plan)
    if scattered:
        around = PrepareModuleInputOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        outer = nnx.Sequential(model)
        model = parallelize_module(outer, mesh["tp"], {"layers.0": around})
        layer = outer.layers[0].layer
    else:
        layer = model.layer
    (loss,) = trained(model, mesh, lambda m, x: m(x).mean(), jnp.ones((1, num_ranks, num_ranks)))
    assert loss == num_ranks + 100
    assert float(layer.bias[...][0]) == 99.0  # 100 minus a gradient of 1


def test_tp_2_heads_are_never_cut() -> None:
    for num_heads, match in (
        (2, "2 heads, which do not divide by tp=4"),
        (6, "6 heads, which do not divide by tp=4"),
    ):
        attention = nnx.MultiHeadAttention(num_heads, 2 * num_heads, decode=False, rngs=nnx.Rngs(0))
        with pytest.raises(ParallelizeError, match=match):
            parallelize_module(attention, mesh_of(1, 4)["tp"], AttentionParallel())


@pytest.mark.parametrize(("length", "num_ranks"), [(4, 2), (5, 2)])
def test_tp_5_norm_gradients_are_sums_over_the_sequence(length: int, num_ranks: int) -> None:
    """y = g * x, loss = sum(y) over x = 1 .. length: the gradient of g is the sum of x, or an error with the numbers."""

    class Scale(nnx.RMSNorm):
        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.scale[...]

    model = nnx.Sequential(nnx.Sequential(Scale(1, rngs=nnx.Rngs(0))))
    mesh = mesh_of(1, num_ranks)
    parallelize_module(model, mesh["tp"], {"layers.0": SPLIT_INSIDE, "layers.0.layers.0": SequenceParallel()})
    x = jnp.arange(1.0, length + 1).reshape(1, length, 1)
    if length % num_ranks:
        with pytest.raises(ParallelizeError, match="5 % 2 = 1. Pad it to 6"):
            trained(model, mesh, lambda m, x: m(x).sum(), x)
        return
    trained(model, mesh, lambda m, x: m(x).sum(), x)
    scale = model.layers[0].layers[0].scale[...]
    assert [float(shard.data[0]) for shard in scale.addressable_shards] == [1.0 - 10.0] * num_ranks


class Dropping(nnx.Module):
    """Dropout on the hidden features, which are split, and on the output, which is whole or split along the sequence."""

    def __init__(self) -> None:
        self.up, self.down = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1))
        self.hidden, self.last = (nnx.Dropout(0.5, rngs=nnx.Rngs(i)) for i in (2, 3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.down(self.hidden(self.up(x))))


def test_tp_6_dropout_does_not_depend_on_the_layout() -> None:
    x = jax.random.normal(jax.random.key(0), (4, 4, 4))

    def after(dp: int, tp: int, plan: Any) -> list[np.ndarray]:
        mesh, model = mesh_of(dp, tp), nnx.Sequential(Dropping())
        model.train()
        if plan:
            parallelize_module(model, mesh["tp"], plan)
        trained(model, mesh, lambda m, x: (m(x) ** 2).mean(), x, num_steps=2, lr=0.1)
        return [np.asarray(full_array(p)) for p in jax.tree.leaves(nnx.state(model, nnx.Param))]

    tp = {
        "layers.0.up": ColwiseParallel(),
        "layers.0.hidden": SequenceParallel(sequence_dim=-1),
        "layers.0.down": RowwiseParallel(),
    }
    sp = {
        "layers.0": SPLIT_INSIDE,
        "layers.0.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.0.hidden": SequenceParallel(sequence_dim=-1),
        "layers.0.down": RowwiseParallel(output_layouts=Shard(1)),
        "layers.0.last": SequenceParallel(),
    }
    expected = after(1, 1, None)
    for layout in ((2, 2, tp), (1, 4, sp)):
        for ours, theirs in zip(after(*layout), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_tp_6_initial_values_do_not_depend_on_the_layout() -> None:
    def made(num_ranks: int, style: Any) -> np.ndarray:
        mesh = mesh_of(1, num_ranks)
        model = jaxpar.init_sharded(
            lambda: nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0))),
            lambda m: parallelize_module(m, mesh["tp"], {"layers.0": style}),
        )
        return np.asarray(full_array(model.layers[0].kernel[...]))

    expected = made(1, ColwiseParallel())
    for num_ranks in (2, 4):
        for style in (ColwiseParallel(), RowwiseParallel()):
            np.testing.assert_array_equal(made(num_ranks, style), expected)
