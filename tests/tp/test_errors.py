"""A wrong plan is an early, named error: at construction where the plan shows it, at trace time where only shapes do."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar._errors import BatchError, ParallelizeError
from jaxpar.fsdp import fully_shard
from jaxpar.mesh import Partial, Replicate, Shard, init_device_mesh
from jaxpar.tp import (
    AttentionParallel,
    ColwiseParallel,
    ContextParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    auto_plan,
    column_linear,
    parallelize_module,
)


class MLP(nnx.Module):
    def __init__(self, width: int = 8) -> None:
        self.up = nnx.Linear(4, width, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(width, 4, rngs=nnx.Rngs(1))
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


def mesh_of(num_ranks: int = 4) -> Any:
    return init_device_mesh((num_ranks,), ("tp",), devices=jax.devices()[:num_ranks])


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ({"upp": ColwiseParallel()}, r"plan\['upp'\] matches no module.*nearest names are \['up'"),
        ({"up": "columns"}, r"plan\['up'\] is 'columns', no style"),
        ("columns", r"the plan is str\. Write a dict"),
        ({"norm": ColwiseParallel()}, "ColwiseParallel does not handle norm, which is BatchNorm"),
        ({"norm": RowwiseParallel()}, "RowwiseParallel does not handle norm, which is BatchNorm"),
        ({"norm": SequenceParallel()}, "SequenceParallel does not handle norm, which is BatchNorm"),
        ({"up": AttentionParallel()}, "AttentionParallel does not handle up, which is Linear"),
        ({"up": ColwiseParallel(axis="model")}, r"ColwiseParallel\(axis='model'\) of 'up'.*has the axes \('tp',\)"),
        ({"up": ColwiseParallel(heads=6)}, r"up has 6 heads, which do not divide by tp=4 ranks: 6 % 4 = 2"),
        ({"up": ColwiseParallel(heads=3, replicate_heads=True)}, r"up has 3 heads.*\(or divide them"),
        ({"down": RowwiseParallel(output_layouts=Partial())}, "nothing around it sums"),
        ({"up": ColwiseParallel(heads=2, replicate_heads=True, overlap=True, input_layouts=Shard(1))}, "Drop overlap from this layer"),
        ({"up": ColwiseParallel(overlap=True)}, r"overlap=True on up \(Linear, input_layouts=Replicate"),
        ({"down": RowwiseParallel(overlap=True)}, r"overlap=True on down \(Linear, output_layouts=Replicate"),
        ({"up": ColwiseParallel(), "u*": ColwiseParallel()}, "is split over 'tp' already"),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused(plan: Any, match: str) -> None:
    with pytest.raises(ParallelizeError, match=match):
        parallelize_module(MLP(), mesh_of(), plan)


def test_two_styles_without_parameters_are_refused() -> None:
    style = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
    with pytest.raises(ParallelizeError, match=r"u\* has a style already, PrepareModuleInput"):
        parallelize_module(MLP(), mesh_of(), {"up": style, "u*": style})


def test_a_dim_that_does_not_divide_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ParallelizeError, match=r"dim 1 of up.kernel, float32\[4, 6\].*6 % 4 = 2.*Make the dim 8"
    ):
        parallelize_module(MLP(6), mesh_of(), {"up": ColwiseParallel()})


def test_a_mesh_of_several_axes_needs_styles_that_name_theirs() -> None:
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    with pytest.raises(ParallelizeError, match=r"the mesh has the axes \('dp', 'tp'\).*mesh\['tp'\]"):
        parallelize_module(MLP(), mesh, {"up": ColwiseParallel()})
    parallelize_module(MLP(), mesh, {"up": ColwiseParallel(axis="tp")})


@pytest.mark.parametrize(
    ("layer", "style", "match"),
    [
        (nnx.Conv(4, 8, (3,), feature_group_count=2, rngs=nnx.Rngs(0)), ColwiseParallel(), "feature_group_count=2"),
        (nnx.LinearGeneral(4, 8, batch_axis={0: 2}, rngs=nnx.Rngs(0)), ColwiseParallel(), "batch_axis={0: 2}"),
        (nnx.LinearGeneral(4, 8, axis=0, rngs=nnx.Rngs(0)), RowwiseParallel(), r"it has axis=\(0,\)"),
        (nnx.Einsum("bij,ij->bij", (4, 4), rngs=nnx.Rngs(0)), ColwiseParallel(), "no letter of its kernel is a new dim"),
        (nnx.Einsum("bij,ij->bij", (4, 4), rngs=nnx.Rngs(0)), RowwiseParallel(), "sums over no letter"),
        (nnx.MultiHeadAttention(6, 12, decode=False, rngs=nnx.Rngs(0)), AttentionParallel(), "6 heads"),
        (
            nnx.MultiHeadAttention(4, 8, dropout_rate=0.1, broadcast_dropout=False, decode=False, rngs=nnx.Rngs(0)),
            AttentionParallel(),
            "broadcast_dropout=False",
        ),
        (nnx.List([]), PrepareModuleInput(), "is never called itself"),
    ],
)  # fmt: skip
def test_a_layer_that_cannot_be_split_so_is_refused(layer: Any, style: Any, match: str) -> None:
    with pytest.raises(ParallelizeError, match=match):
        parallelize_module(layer, mesh_of(), style)


def test_layouts_that_do_not_pair_up_are_refused() -> None:
    with pytest.raises(ParallelizeError, match="do not pair up: 1 .* and 0"):
        PrepareModuleInput(input_layouts=Shard(1))
    with pytest.raises(ParallelizeError, match="do not pair up"):
        PrepareModuleInputOutput(
            input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"y": Shard(1)}
        )


def test_a_flat_stored_parameter_is_split_before_it_is_fully_sharded() -> None:
    mesh = init_device_mesh((2, 4), ("dp", "tp"))
    model = nnx.Sequential(nnx.Linear(3, 5, rngs=nnx.Rngs(0)))
    fully_shard(model, mesh["dp"], pad_above_bytes=1)
    with pytest.raises(
        ParallelizeError, match="was stored flat by fully_shard.*Call parallelize_module first"
    ):
        parallelize_module(model, mesh["tp"], {"layers.0": ColwiseParallel()})


def test_a_model_without_anything_to_split_has_no_plan() -> None:
    with pytest.raises(ParallelizeError, match="auto_plan: RMSNorm has no nnx.Linear"):
        auto_plan(nnx.RMSNorm(4, rngs=nnx.Rngs(0)))


def traced(model: Any, num_ranks: int = 4) -> None:
    """Traces one training step, which is where shapes and types of activations are seen."""
    mesh = init_device_mesh((1, num_ranks), ("dp", "tp"), devices=jax.devices()[:num_ranks])
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(lambda m, x: m(x).mean(), model, optimizer, mesh=mesh, batch_axes="dp")
    step.lower(jnp.ones((4, 4)))


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        # A column-split output that meets a layer which reads all of it.
        ({"up": ColwiseParallel(), "down": ColwiseParallel()}, r"ColwiseParallel on down: .* reads 8 elements"),
        ({"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel()}, "RowwiseParallel on down: .* reads 2"),
        # Declared layouts that are not so.
        ({"up": ColwiseParallel(input_layouts=Shard(0))}, "nobody has split it"),
        ({"up": ColwiseParallel(input_layouts=Partial())}, "cannot read terms of a sum"),
        ({"up": ColwiseParallel(), "down": RowwiseParallel(input_layouts=Replicate())}, "RowwiseParallel on down.*left its output sharded"),
        ({"down": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(3))}, "there is no dim 3"),
    ],
)  # fmt: skip
def test_layouts_that_do_not_meet_are_refused_when_the_step_is_traced(plan: Any, match: str) -> None:
    mesh = init_device_mesh((1, 4), ("dp", "tp"), devices=jax.devices()[:4])
    with pytest.raises(ParallelizeError, match=match):
        traced(parallelize_module(MLP(), mesh["tp"], plan))


def test_an_output_left_split_is_refused_when_the_loss_is_taken_of_it() -> None:
    mesh = init_device_mesh((1, 4), ("dp", "tp"), devices=jax.devices()[:4])
    with pytest.raises(BatchError, match=r"'loss.total' differs .* \['tp'\].*some output was left sharded"):
        traced(parallelize_module(MLP(), mesh["tp"], {"down": ColwiseParallel()}))


def test_a_sequence_that_does_not_divide_is_refused_with_the_numbers() -> None:
    mesh = mesh_of()
    f = lambda x, w: column_linear(x, w, axis="tp", output_layouts=Shard(0))  # noqa: E731
    mapped = jax.shard_map(f, mesh=mesh.jax_mesh, in_specs=(P(), P(None, "tp")), out_specs=P("tp"))
    with pytest.raises(
        ParallelizeError, match=r"dim 0 of float32\[5, 2\] does not divide.*5 % 4 = 1. Pad it to 8"
    ):
        mapped(jnp.ones((5, 4)), jnp.ones((4, 8)))


def test_dropout_of_split_activations_needs_to_know_along_which_dim() -> None:
    class Dropping(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(self.dropout(self.up(x)))

    mesh = init_device_mesh((1, 4), ("dp", "tp"), devices=jax.devices()[:4])
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    with pytest.raises(ParallelizeError, match="nothing says along which dim it is split"):
        traced(parallelize_module(Dropping(), mesh["tp"], plan))


def test_outputs_of_another_number_are_refused() -> None:
    mesh = init_device_mesh((1, 4), ("dp", "tp"), devices=jax.devices()[:4])
    style = PrepareModuleOutput(
        output_layouts=(Replicate(), Replicate()), desired_output_layouts=(Shard(0), Shard(0))
    )
    with pytest.raises(ParallelizeError, match="output_layouts names 2 outputs, and the call has 1"):
        traced(parallelize_module(MLP(), mesh["tp"], {"up": style}))
    style = PrepareModuleInput(
        input_layouts=(Replicate(), Replicate()), desired_input_layouts=(Shard(0), Shard(0))
    )
    with pytest.raises(
        ParallelizeError, match="input_layouts names 2 positional arguments, and the call has 1"
    ):
        traced(parallelize_module(MLP(), mesh["tp"], {"up": style}))


def test_a_ring_of_a_sequence_that_nobody_split_is_refused() -> None:
    mesh = init_device_mesh((4,), ("cp",), devices=jax.devices()[:4])
    attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    parallelize_module(attention, mesh, ContextParallel())
    f = jax.shard_map(attention, mesh=mesh.jax_mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ParallelizeError, match=r"nobody has split the sequence.*split_sequence\(x, 'cp'\)"):
        f(jnp.ones((2, 8, 4)))


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "does not handle Linear"),
        (nnx.MultiHeadAttention(2, 4, dropout_rate=0.1, decode=False, rngs=nnx.Rngs(0)), "dropout_rate=0.1"),
        (
            nnx.MultiHeadAttention(2, 4, attention_fn=print, decode=False, rngs=nnx.Rngs(0)),
            "attention_fn of its own",
        ),
    ],
)
def test_what_cannot_be_a_ring_is_refused(module: Any, match: str) -> None:
    with pytest.raises(ParallelizeError, match=match):
        parallelize_module(module, mesh_of(), ContextParallel())


def test_a_ring_takes_no_mask() -> None:
    mesh = init_device_mesh((4,), ("cp",), devices=jax.devices()[:4])
    attention = parallelize_module(
        nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0)), mesh, ContextParallel()
    )
    f = lambda x: attention(x, mask=jnp.ones((1, 1, 2, 2), bool))  # noqa: E731
    with pytest.raises(ParallelizeError, match="a mask for whole sequences was given"):
        jax.shard_map(f, mesh=mesh.jax_mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"))(
            jnp.ones((2, 8, 4))
        )
