"""What a plan puts on the wire, read from the compiled program: Megatron's counts, and nothing else."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.debug import collectives, memory
from jaxpar.mesh import Partial, Replicate, Shard, init_device_mesh
from jaxpar.tp import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    auto_plan,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from transformer import Block, TransformerConfig

WIDTH, BATCH, LENGTH = 16, 2, 8
ACTIVATION = 4 * BATCH * LENGTH * WIDTH  # bytes of one, whole


class Blocks(nnx.Module):
    """Two blocks of the example's transformer on given activations."""

    def __init__(self) -> None:
        config = TransformerConfig(width=WIDTH, heads=4, kv_heads=4, hidden=32)
        self.blocks = nnx.List([Block(config, rngs=nnx.Rngs(i)) for i in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


PLAIN: dict[str, ParallelStyle] = {
    "**.qkv": ColwiseParallel(heads=4),
    "**.out": RowwiseParallel(),
    "**.gate": ColwiseParallel(),
    "**.up": ColwiseParallel(),
    "**.down": RowwiseParallel(),
}
WHOLE_INSIDE = PrepareModuleInputOutput(
    input_layouts=Shard(1),
    desired_input_layouts=Replicate(),
    output_layouts=Partial(),
    desired_output_layouts=Shard(1),
)
SEQUENCE: dict[str, ParallelStyle] = PLAIN | {
    "**.norm[12]": SequenceParallel(),
    "**.attention": WHOLE_INSIDE,
    "**.mlp": WHOLE_INSIDE,
    "**.out": RowwiseParallel(output_layouts=Partial()),
    "**.down": RowwiseParallel(output_layouts=Partial()),
}


class Around(nnx.Module):
    def __init__(self, inner: nnx.Module) -> None:
        self.inner = inner

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


AROUND = PrepareModuleInputOutput(
    input_layouts=Replicate(),
    desired_input_layouts=Shard(1),
    output_layouts=Shard(1),
    desired_output_layouts=Replicate(),
)


def compiled(model: Any, num_ranks: int) -> tuple[Any, Any]:
    """The program of a step, and its mesh."""
    mesh = init_device_mesh((1, num_ranks), ("dp", "tp"), devices=jax.devices()[:num_ranks])
    if isinstance(model, Around):
        plan = {f"inner.{name}": style for name, style in SEQUENCE.items()} | {"inner": AROUND}
    else:
        plan = PLAIN
    parallelize_module(model, mesh["tp"], plan)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh, batch_axes="dp")
    return step.lower(jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)).compile(), mesh


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_block_has_two_all_reduces_forward_and_two_backward(num_ranks: int) -> None:
    program, mesh = compiled(Blocks(), num_ranks)
    table = collectives(program, mesh=mesh)
    assert table.count() == table.count("all_reduce", "tp") == 2 * (2 + 2)
    assert table.bytes("all_reduce", "tp") == 8 * ACTIVATION


def test_with_sequence_parallel_it_has_gathers_and_scatters_and_one_sum_for_all_norms() -> None:
    program, mesh = compiled(Around(Blocks()), 2)
    table = collectives(program, mesh=mesh)
    # Two blocks: two gathers and scatters each way; the output is gathered once. The cotangent of the input is not wanted.
    assert table.count("all_gather", "tp") == 2 * (2 + 2) + 1
    assert table.count("reduce_scatter", "tp") == 2 * (2 + 2)
    assert table.count("all_reduce", "tp") == 1
    assert table.bytes("all_reduce", "tp") == 4 * 4 * WIDTH  # four scales
    assert table.count() == 9 + 8 + 1


def test_a_model_is_never_whole_on_a_device() -> None:
    program, _ = compiled(Blocks(), 4)
    whole = sum(x.size * 4 for x in jax.tree.leaves(nnx.state(Blocks(), nnx.Param)))
    scales = 4 * 4 * WIDTH
    batch = ACTIVATION
    assert memory(program).argument_bytes == pytest.approx((whole - scales) / 4 + scales + batch, abs=64)


def test_a_proposed_plan_is_megatrons() -> None:
    plan = auto_plan(Blocks())
    assert {name: type(style).__name__ for name, style in plan.items()} == {
        "blocks.*.attention.qkv": "ColwiseParallel",
        "blocks.*.attention.out": "RowwiseParallel",
        "blocks.*.mlp.gate": "ColwiseParallel",
        "blocks.*.mlp.up": "ColwiseParallel",
        "blocks.*.mlp.down": "RowwiseParallel",
    }
    assert "blocks.*.mlp.down       RowwiseParallel()" in str(plan)
    # Abstract modules have their attributes in another order.
    assert {name: type(style) for name, style in auto_plan(nnx.eval_shape(Blocks)).items()} == {
        name: type(style) for name, style in plan.items()
    }
    mesh = init_device_mesh((4,), ("tp",), devices=jax.devices()[:4])
    model = parallelize_module(Blocks(), mesh, plan)
    x = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, WIDTH))
    np.testing.assert_allclose(model(x), Blocks()(x), rtol=1e-5, atol=1e-6)


def test_what_is_not_clear_is_not_split_and_said_so() -> None:
    class Square(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = (nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2))

    model = nnx.List([Square(), nnx.Sequential(*[nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2)])])
    plan = auto_plan(model)
    assert list(plan) == ["*.layers.0", "*.layers.1"] and plan.unclear == ("0",)
    assert "# 0: which layer is the last? not split" in str(plan)
