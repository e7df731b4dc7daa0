"""What a step of a pipelined model refuses, and where its arrays lie."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar._errors import BatchError, ParallelizeError
from jaxpar.ddp import DistributedDataParallel, PowerSGD
from jaxpar.fsdp import CPUOffloadPolicy, fully_shard, shard_optimizer_state
from jaxpar.mesh import DeviceMesh, init_device_mesh
from jaxpar.pp import Schedule, gathered, pipeline

BATCH = {"x": np.ones((8, 4), np.float32), "y": np.zeros((8, 4), np.float32)}


@pytest.fixture(autouse=True, scope="module")
def values_only():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def make_model() -> Any:
    return nnx.Sequential(*[nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)])


def loss_fn(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make_mesh(dp: int = 1) -> DeviceMesh:
    return init_device_mesh((2, dp), ("pp", "dp"), devices=jax.devices()[: 2 * dp])


def make_step(
    model: Any, mesh: DeviceMesh, *, tx: Any = None, batch_axes: Any = "dp", **options: Any
) -> jaxpar.TrainStep:
    optimizer = nnx.Optimizer(model, tx or optax.adam(1e-2), wrt=nnx.Param)
    return jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, batch_axes=batch_axes, **options)


def pipelined(mesh: DeviceMesh, model: Any = None) -> Any:
    return pipeline(model or make_model(), mesh["pp"], n_stages=2, n_microbatches=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_axes": ("pp", "dp")},
            "'pp' is the pipeline's axis, and is named among the axes that split the batch",
        ),
    ],
)
def test_options_that_a_pipeline_has_in_another_way(options: dict[str, Any], message: str) -> None:
    mesh = make_mesh()
    with pytest.raises(ParallelizeError, match=re.escape(message).replace(r"\.\*", ".*")):
        make_step(pipelined(mesh), mesh, **options)


def test_the_mesh_must_be_that_of_the_plan() -> None:
    model = pipelined(make_mesh())
    with pytest.raises(
        ParallelizeError, match="given to pipeline over the axis 'pp', but the mesh of this step has"
    ):
        make_step(model, init_device_mesh((2,), ("dp",), devices=jax.devices()[:2]))
    with pytest.raises(ParallelizeError, match="schedule is for 2 ranks, but mesh axis 'pp' has 4"):
        make_step(model, init_device_mesh((4, 1), ("pp", "dp"), devices=jax.devices()[:4]))


def test_what_a_pipeline_does_not_offer_yet() -> None:
    mesh = make_mesh(2)
    model = pipelined(mesh)
    optimizer = shard_optimizer_state(nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), mesh["dp"])
    with pytest.raises(
        ParallelizeError, match="shard_optimizer_state .* is not offered for a pipelined model"
    ):
        jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, batch_axes="dp")
    with pytest.raises(ParallelizeError, match="hook of DistributedDataParallel keeps a state"):
        hooked = DistributedDataParallel(make_model(), mesh["dp"], comm_hook=PowerSGD())
        make_step(pipelined(mesh, hooked), mesh)
    with pytest.raises(ParallelizeError, match="layers.0.bias is sharded over 'pp', the pipeline's axis"):
        sharded = make_model()
        over_pp = NamedSharding(mesh.jax_mesh, PartitionSpec("pp"))
        sharded.layers[0].bias[...] = jax.device_put(sharded.layers[0].bias[...], over_pp)
        make_step(pipelined(mesh, sharded), mesh)
    with pytest.raises(ParallelizeError, match="layers.0.bias lies in host memory"):
        offloaded = fully_shard(make_model(), mesh["dp"], offload_policy=CPUOffloadPolicy())
        make_step(pipelined(mesh, offloaded), mesh)


def test_a_transform_that_looks_at_all_gradients_is_refused() -> None:
    mesh = make_mesh()
    step = make_step(pipelined(mesh), mesh, tx=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    with pytest.raises(
        ParallelizeError, match=r"update of layers.0.bias depends on .* stages \[0, 1\].*clip_norm="
    ):
        step(BATCH)


def test_rows_that_do_not_divide() -> None:
    """PP5: fewer rows than microbatches, and rows that the ranks do not divide."""
    mesh = make_mesh(2)
    step = make_step(pipelined(mesh), mesh)
    with pytest.raises(BatchError, match="a batch of 5 rows does not divide into 2 ranks"):
        step({name: x[:5] for name, x in BATCH.items()})
    with pytest.raises(
        BatchError,
        match=r"a batch of 2 rows has 1 for each of 2 ranks.* the 2 microbatches .*Give 4 .*n_microbatches=1\)",
    ):
        step({name: x[:2] for name, x in BATCH.items()})
    with pytest.raises(
        BatchError, match="a batch of 6 rows does not divide into 2 ranks .* x 2 microbatches"
    ):
        step({"x": BATCH["x"], "y": BATCH["y"][:6]})


def test_a_pipelined_step_is_no_single_program() -> None:
    mesh = make_mesh()
    with pytest.raises(ParallelizeError, match="a pipelined step is not one program"):
        make_step(pipelined(mesh), mesh).lower(BATCH)


def test_parameters_and_state_lie_on_their_stage_and_can_be_gathered() -> None:
    mesh = make_mesh(2)
    model = pipelined(mesh)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh)  # batch_axes: what is no pipeline
    first = float(step(BATCH)["loss"])
    devices = [{d.id for d in layer.kernel[...].sharding.device_set} for layer in model.layers]
    assert devices == [{0, 1}, {2, 3}]
    state = {
        d.id for x in jax.tree.leaves(nnx.state(optimizer.opt_state)) if x.ndim for d in x.sharding.device_set
    }
    assert state == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="incompatible devices"):
        loss_fn(model, BATCH)
    with gathered(model, mesh):
        before = float(loss_fn(model, BATCH))
        model.layers[0].bias[...] = model.layers[0].bias[...] + 0.0
    assert [{d.id for d in layer.kernel[...].sharding.device_set} for layer in model.layers] == devices
    assert before < first
    assert float(step(BATCH)["loss"]) == pytest.approx(before, rel=1e-6)


def test_a_second_step_takes_the_model_from_the_stages() -> None:
    mesh = make_mesh()
    model = pipelined(mesh)
    first = make_step(model, mesh)
    losses = [float(first(BATCH)["loss"]) for _ in range(2)]
    second = make_step(model, mesh)
    assert float(second({name: np.repeat(x, 2, axis=0) for name, x in BATCH.items()})["loss"]) < losses[-1]


def test_other_batch_shapes_compile_and_run() -> None:
    mesh = make_mesh()
    step = make_step(pipelined(mesh), mesh)
    assert jnp.isfinite(step(BATCH)["loss"])
    assert jnp.isfinite(step({name: x[:4] for name, x in BATCH.items()})["loss"])
    assert jnp.isfinite(step(BATCH)["loss"])


def test_gathered_leaves_other_models_alone() -> None:
    model = make_model()
    with gathered(model, make_mesh()) as same:
        assert same is model


class Tied(nnx.Module):
    """The first and the last stage use one table."""

    def __init__(self) -> None:
        self.embed = nnx.Embed(8, 8, rngs=nnx.Rngs(0))
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.embed.attend(x)


@pytest.mark.parametrize("executor", ["mpmd", "spmd"])
def test_parameters_that_are_assigned_between_steps_go_to_their_stages(executor: Any) -> None:
    """A table that both stages use, and a layer of the second one: arrays on the first device, or of NumPy."""
    mesh, tokens = make_mesh(), np.zeros((8, 3), np.int32)

    def assign(model: Any, number: float) -> Any:
        model.embed.embedding.set_value(jnp.full((8, 8), number))
        model.blocks[1].kernel.set_value(np.full((8, 8), number / 2, np.float32))
        return model

    model = pipeline(Tied(), mesh["pp"], n_stages=2, n_microbatches=2, executor=executor)
    optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)
    step = jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh)
    for number in (0.25, 0.5):  # before the first step, and after it
        assign(model, number)
        expected = (assign(Tied(), number)(jnp.asarray(tokens)) ** 2).mean()
        np.testing.assert_allclose(step(tokens)["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_activations_are_all_that_travels_and_no_weights(is_sharded: bool) -> None:
    """Of tied weights each stage gathers its own copy, and no token of the order of gathers crosses stages."""
    mesh = make_mesh(2)
    model = Tied()
    if is_sharded:
        fully_shard(model, mesh["dp"], units="blocks.*")
    pipeline(model, mesh["pp"], n_stages=2, n_microbatches=2)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh)
    tokens = np.zeros((8, 3), np.int32)
    stages = step._engine._compiled_for([tokens], jax.tree.structure(0)).stages  # type: ignore[union-attr]
    assert [str(x.dtype) + str(list(x.shape)) for x in stages[0].code.sent] == ["float32[2, 3, 8]"]
    shared = set(stages[0].code.params) & set(stages[1].code.params)
    assert [step._model.chosen_names[i] for i in shared] == ["embed.embedding"]


def test_running_statistics_follow_the_microbatches_or_are_refused() -> None:
    mesh = make_mesh()
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(1)))
    model.train()
    out_of_order = Schedule([["0F1", "0F0", "0B0", "0B1"], ["1F1", "1F0", "1B0", "1B1"]])
    pipeline(model, mesh["pp"], n_stages=2, schedule=out_of_order)
    with pytest.raises(ParallelizeError, match=r"stage 1 changes variables .* at steps \[1, 0\]"):
        make_step(model, mesh)(BATCH)


def test_stages_are_at_least_one() -> None:
    with pytest.raises(ParallelizeError, match="n_stages=0 must be at least 1"):
        pipeline(make_model(), make_mesh()["pp"], n_stages=0, n_microbatches=2)


# Gathered once


class Two(nnx.Module):
    """A layer for each stage."""

    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def sharded(mesh: DeviceMesh) -> Any:
    return pipelined(mesh, fully_shard(Two(), mesh["dp"], units="layers.*"))


@pytest.mark.parametrize("is_unsharded", [False, True])
def test_units_are_gathered_in_each_microbatch_or_once_in_a_step(is_unsharded: bool) -> None:
    mesh = make_mesh(2)
    step = make_step(sharded(mesh), mesh, batch_axes="dp", accumulate_unsharded=is_unsharded)
    engine: Any = step._engine
    leaves, treedef = jax.tree.flatten(BATCH)
    compiled = engine._compiled_for(leaves, treedef)
    stage, a = compiled.stages[1], engine._arrays(compiled, leaves)[1]
    received, after = (
        [jnp.zeros(t.shape, t.dtype, device=t.sharding) for t in some]
        for some in (stage.received, stage.after)
    )
    F = stage.forward.lower(a.params, a.fixed, a.changed, a.batch, np.int32(0), received, a.sums)
    _, kept, *_ = stage.forward(a.params, a.fixed, a.changed, a.batch, np.int32(0), received, a.sums)
    B = stage.backward.lower(a.params, kept, received, after, a.grads)
    in_microbatch = "\n".join(program.compile().as_text() for program in (F, B))
    assert ("all-gather" in in_microbatch) == ("reduce-scatter" in in_microbatch) == (not is_unsharded)
    assert (compiled.gathers[1] is not None) == is_unsharded


class Frozen(nnx.Param):
    """Sharded by its unit, and not trained."""


def test_frozen_variables_of_units_are_not_gathered_once() -> None:
    mesh, model = make_mesh(), Two()
    model.layers[0].kernel = Frozen(model.layers[0].kernel.get_value())
    pipelined(mesh, fully_shard(model, mesh["dp"], units="layers.*"))
    trained = nnx.All(nnx.Param, nnx.Not(Frozen))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=trained)
    with pytest.raises(ParallelizeError, match=r"holds 1 frozen variables.*ignored_params"):
        jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, batch_axes="dp", accumulate_unsharded=True)
