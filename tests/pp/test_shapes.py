"""Ranks of other shapes: dp and tp change at a boundary between stages, and everything stays equal to one device, in float64.

mesh (pp 2, dp 2, tp 2)    shapes {0: dp 4, tp 1}    a microbatch of 4 rows: 1 a device on rank 0, 2 on rank 1
"""

import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import jaxpar
from jaxpar._errors import BatchError, ParallelizeError
from jaxpar._module import vary
from jaxpar._record import record_of
from jaxpar.fsdp import full_state, fully_shard
from jaxpar.mesh import DeviceMesh, Replicate, Shard, init_device_mesh
from jaxpar.pp import gathered, pipeline, plan_of
from jaxpar.pp._relayout import Boundary, Side, reshaped
from jaxpar.tp import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from jaxpar.train._stage_shapes import fit_records

sys.path.insert(0, str(Path(__file__).parent))
from pipeline_rig import Block, Model, Rig, batch_of, on_one_device

RTOL = 1e-12
WIDE = {"dp": 4, "tp": 1}
BATCH = batch_of(16)
NUM_MICROBATCHES = 4


pytestmark = pytest.mark.usefixtures("float64_values_only")


def make_mesh(dp: int = 2, tp: int = 2) -> DeviceMesh:
    return init_device_mesh((2, dp, tp), ("pp", "dp", "tp"), devices=jax.devices()[: 2 * dp * tp])


def plan(sequence: Any = None) -> Any:
    """Megatron's plan; with the residual stream split by sequences, if asked for."""
    read = {} if sequence is None else {"input_layouts": sequence}
    made = {} if sequence is None else {"output_layouts": sequence}
    attend = {} if sequence is None else {"attend_input_layouts": sequence}
    return {
        "embed": RowwiseParallel(**made, **attend),
        "blocks.*.up": ColwiseParallel(**read),
        "blocks.*.down": RowwiseParallel(**made),
    } | ({} if sequence is None else {"blocks.*.dropout": SequenceParallel()})


def plain_loss(model: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
    """A plain mean; and metrics of both stages and of the batch: plain, weighted, of whole numbers."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    logits = model(inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean(), {
        "size": jnp.square(model.embed(inputs)).mean(),
        "hits": jaxpar.Mean((logits.argmax(-1) == targets).sum(), (targets >= 0).sum()),
        "weight": batch["weights"].mean(),
        "token": jaxpar.Mean(inputs.sum(), batch["weights"].sum()),
    }


def token_loss(model: Any, batch: Any) -> jaxpar.Mean:
    tokens, weights = batch["tokens"], batch["weights"]
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    return jaxpar.Mean((losses * weights).sum(), weights.sum())


def rig(
    model: Any, shapes: Any, loss: Any, *, split: Any, tp_plan: Any, is_sharded: bool = False, **options: Any
) -> Rig:
    mesh = make_mesh()
    parallelize_module(model, mesh["tp"], tp_plan)
    if is_sharded:
        fully_shard(model, mesh["dp"], units="blocks.*")
    pipeline(model, mesh["pp"], split_spec=split, n_microbatches=NUM_MICROBATCHES, shapes=shapes)
    return Rig(model, mesh, BATCH, loss=loss, batch_axes="dp", **options)


def test_a_wider_first_rank_equals_one_device() -> None:
    """Gradients by SGD; a tied embedding, a skip over all blocks and dropout; metrics of both ranks."""
    split = {"blocks.0": "end"}
    ours = rig(Model(1), {0: WIDE}, plain_loss, split=split, tp_plan=plan(), tx=optax.sgd(0.5))
    single = on_one_device(Model(1), BATCH, NUM_MICROBATCHES, loss=plain_loss, tx=optax.sgd(0.5))
    ours.run(num_steps=2).assert_equals(single.run(num_steps=2), RTOL)


def test_a_wider_last_rank_equals_one_device() -> None:
    """AdamW, units of fully_shard, a residual stream that tp splits by sequences on one side of the boundary only."""

    def model() -> Model:
        made = Model(1)
        made.blocks[0].__class__ = ByPosition
        return made

    split = {"blocks.0": "beginning"}
    ours = rig(model(), {1: WIDE}, token_loss, split=split, tp_plan=plan(Shard(1)), is_sharded=True)
    single = on_one_device(model(), BATCH, NUM_MICROBATCHES, loss=token_loss)
    ours.run(num_steps=2).assert_equals(single.run(num_steps=2), RTOL)


class ByPosition(Block):
    """A block that needs no other position, so that sequences may be split."""

    def __call__(self, x_BTD: jax.Array, *, mask: jax.Array) -> jax.Array:
        weight = mask[:, -1].sum(axis=-1)[:, None, None]
        return x_BTD + self.dropout(self.down(jax.nn.silu(self.up(x_BTD)))) * weight


def test_all_that_a_step_does_besides(tmp_path: Path) -> None:
    """An axis that one rank alone has, and a batch on the devices; evaluated, gathered, saved, timed, and built again."""
    rng = np.random.default_rng(0)
    rows = {name: rng.normal(size=(16, 4)) for name in ("x", "y")}

    def make_step(mesh: Any, model: Any, **options: Any) -> jaxpar.TrainStep:
        optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
        return jaxpar.TrainStep(square_loss, model, optimizer, mesh=mesh, batch_axes="dp", **options)

    mesh, model = make_mesh(4, 1), layers(2)
    pipeline(model, mesh["pp"], n_microbatches=2, shapes={1: {"dp": 2, "tp": 2}})
    ours, single_model = make_step(mesh, model, accumulate=2), layers(2)
    single = make_step(init_device_mesh((1,), ("dp",), devices=jax.devices()[:1]), single_model, accumulate=4)
    on_devices = {name: jnp.asarray(x) for name, x in rows.items()}

    def assert_alike(name: str) -> None:
        ours_now, theirs = getattr(ours, name)(on_devices), getattr(single, name)(rows)
        assert float(ours_now["loss"]) == pytest.approx(float(theirs["loss"]), rel=RTOL)

    for name in ("__call__", "__call__", "evaluate"):
        assert_alike(name)
    lies = [dict(layer.kernel[...].sharding.mesh.shape) for layer in model.layers]
    assert lies == [{"dp": 4, "tp": 1}, {"dp": 2, "tp": 2}]
    for state in zip(full_state(model).values(), full_state(single_model).values(), strict=True):
        np.testing.assert_allclose(*state, rtol=RTOL)
    with gathered(model, mesh):
        np.testing.assert_allclose(model(rows["x"]), single_model(rows["x"]), rtol=RTOL)
        model.layers[1].bias[...] += 0.5
    single_model.layers[1].bias[...] += 0.5
    assert lies == [dict(layer.kernel[...].sharding.mesh.shape) for layer in model.layers]
    timeline: Any = ours.trace(rows, tmp_path / "pp.json", repeats=1)
    assert len(timeline.events[1]) == 4
    assert min(*timeline.costs.F, *timeline.costs.B, timeline.costs.latency) > 0
    ours = make_step(mesh, model, accumulate=2)  # begins with what lies on the ranks
    assert_alike("__call__")


def layers(num: int, width: int = 4) -> Any:
    return nnx.Sequential(*[nnx.Linear(width, width, param_dtype=jnp.float64, rngs=nnx.Rngs(i)) for i in range(num)])  # fmt: skip


def square_loss(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def test_a_part_is_told_from_the_whole_whatever_size_tp_has() -> None:
    """A bias of 4, split by tp 2 and dp 2 on the mesh; by dp alone it is as long as tp's part, and yet a part."""
    mesh, model = make_mesh(), layers(1)
    parallelize_module(model, mesh["tp"], {"layers.0": ColwiseParallel()})
    fully_shard(model, mesh["dp"])
    graphdef, state = nnx.split(model)
    found = []

    def run(bias: jax.Array) -> jax.Array:
        merged = nnx.merge(graphdef, jax.tree.map(jnp.asarray, state))
        merged.layers[0].bias.set_value(bias)
        for fit in (lambda model: None, fit_records):
            fit(merged)
            record: Any = record_of(merged.layers[0].bias)
            found.append((record.is_shard(bias), record.is_shard(jnp.zeros(4))))
        return bias

    other = init_device_mesh((2, 1, 2), ("dp", "tp", "ep"), devices=jax.devices()[:4]).jax_mesh
    spec = PartitionSpec(("tp", "dp"))
    jax.eval_shape(jax.shard_map(run, mesh=other, in_specs=spec, out_specs=spec), jnp.zeros(4))
    assert found == [(False, True), (True, False)]


# What crosses a boundary


def type_of(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any = jnp.float32) -> Any:
    """What a value is to JAX on each device of a mesh."""
    found = []

    def run() -> jax.Array:
        found.append(jax.typeof(vary(jnp.zeros(shape, dtype), axes)))
        return jnp.zeros(())

    jax.eval_shape(jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=PartitionSpec()))
    return found[0]


def boundary(wide: dict[str, int], narrow: dict[str, int], rows: tuple[str, ...] = ("dp",)) -> Boundary:
    """From 8 rows over `wide`, to the same over `narrow`."""
    mesh = init_device_mesh(tuple(wide.values()), tuple(wide)).jax_mesh
    other = reshaped(mesh, init_device_mesh(tuple(narrow.values()), tuple(narrow)).jax_mesh)
    one, two = (Side(m, (8 // int(np.prod([m.shape[axis] for axis in rows])),)) for m in (mesh, other))
    return Boundary(one, two, rows, "from stage 0 to stage 1")


TO_TP = boundary({"dp": 4, "tp": 2, "ep": 1}, {"dp": 2, "tp": 2, "ep": 2})
OVER_TWO = boundary({"dp": 4, "fsdp": 1, "tp": 2}, {"dp": 2, "fsdp": 2, "tp": 2}, ("dp", "fsdp"))
THREE = boundary({"dp": 4, "tp": 1, "ep": 2}, {"dp": 1, "tp": 2, "ep": 4})


@pytest.mark.parametrize(
    ("where", "sent", "received", "spec"),
    [
        (TO_TP, ((2, 6), ("dp",)), ((4, 6), ("dp",)), PartitionSpec(None, "dp", None)),
        (TO_TP, ((6, 2), ("dp",)), ((6, 4), ("dp",)), PartitionSpec(None, None, "dp")),
        (TO_TP, ((2, 6), ("dp",)), ((4, 3), ("dp", "ep")), PartitionSpec(None, "dp", "ep")),
        (TO_TP, ((2, 6), ("dp", "tp")), ((4, 6), ("dp", "tp")), PartitionSpec("tp", "dp", None)),
        (TO_TP, ((3,), ("tp",)), ((3,), ("tp",)), PartitionSpec("tp", None)),
        (TO_TP, ((3,), ()), ((3,), ()), PartitionSpec(None, None)),
        # As many ranks split the rows, over other axes: what each one has stays its own, whatever it is.
        (OVER_TWO, ((), ("dp",)), ((), ("dp", "fsdp")), PartitionSpec(("dp", "fsdp"))),
        (THREE, ((2, 8, 4), ("dp", "ep")), ((8, 4, 2), ("tp", "ep")), None),
        (THREE, ((2, 8), ("dp",)), ((8, 4), ("tp",)), PartitionSpec(None, "dp", "tp")),
    ],
)  # fmt: skip
def test_the_dim_that_an_axis_splits_is_seen_from_both_shapes(
    where: Boundary, sent: Any, received: Any, spec: PartitionSpec | None
) -> None:
    types = type_of(where.source.mesh, *sent), type_of(where.target.mesh, *received)
    if spec is not None:
        assert where.spec(*types) == spec
        return
    with pytest.raises(ParallelizeError, match=r"more than one dim \(\[1, 2\]\) is split in this ratio"):
        where.spec(*types)


@pytest.mark.parametrize(
    ("sent", "received", "message"),
    [
        (((), ("dp",)), ((), ("dp",)), "float32[] on each device of {'dp': 4, 'tp': 2, 'ep': 1} and float32[] on each device of "
         "{'dp': 2, 'tp': 2, 'ep': 2}: it differs between the ranks of 'dp', of which there are 4 and 2, and no dim is split"),
        (((4, 2), ("dp",)), ((8, 2), ("dp",)), "no dim is split in this ratio"),  # twice the rows: not in one piece
        (((2, 6), ("dp",)), ((4, 6), ("dp", "tp")), "it differs between the ranks of 'tp' on one side only"),
        (((2, 6), ("dp",)), ((4, 3), ("dp",)), "no axis splits dim 1 alone"),
        (((2, 6), ("dp",)), ((4, 6, 1), ("dp",)), "they are no parts of one array"),
    ],
)  # fmt: skip
def test_what_has_no_place_on_the_other_rank_is_refused(sent: Any, received: Any, message: str) -> None:
    types = type_of(TO_TP.source.mesh, *sent), type_of(TO_TP.target.mesh, *received)
    with pytest.raises(ParallelizeError, match=re.escape(message)):
        TO_TP.spec(*types)


# What is refused


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({2: WIDE}, {}, "shapes names rank 2, but mesh axis 'pp' has the ranks 0 to 1"),
        ({0: {"pp": 1}}, {}, "shapes[0] names 'pp', but the devices of a rank lie along ('dp', 'tp')"),
        ({1: {"dp": 4}}, {}, "shapes[1] = {'dp': 4} makes dp 4 x tp 2 = 8 devices, but each rank of 'pp' has 4 (dp 2 x tp 2)"),
        ({1: {"dp": -2, "tp": -2}}, {}, "makes dp -2 x tp -2 = 4 devices"),
        ({1: WIDE}, {"executor": "spmd"}, "executor='spmd' is one program over the whole mesh"),
    ],
)  # fmt: skip
def test_shapes_that_no_rank_can_have(shapes: Any, options: Any, message: str) -> None:
    with pytest.raises(ParallelizeError, match=re.escape(message)):
        pipeline(layers(2), make_mesh()["pp"], n_microbatches=2, shapes=shapes, **options)


def test_a_shape_that_the_mesh_has_anyway_is_none() -> None:
    mesh = make_mesh()
    model = pipeline(layers(2), mesh["pp"], n_microbatches=2, shapes={0: {"tp": 2}, 1: {}}, executor="spmd")
    assert plan_of(model) == plan_of(pipeline(layers(2), mesh["pp"], n_microbatches=2, executor="spmd"))


def step_of(
    shapes: Any,
    *,
    sizes: tuple[int, int, int] = (2, 2, 2),
    width: int = 4,
    tp_plan: Any = None,
    is_sharded: bool = False,
    loss: Any = square_loss,
    **options: Any,
) -> jaxpar.TrainStep:
    mesh, model = init_device_mesh(sizes, ("pp", "dp", "tp")), layers(2, width)
    if tp_plan is not None:
        parallelize_module(model, mesh["tp"], tp_plan)
    if is_sharded:
        fully_shard(model, mesh["dp"], units="layers.*")
    pipeline(model, mesh["pp"], n_microbatches=2, shapes=shapes)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return jaxpar.TrainStep(loss, model, optimizer, mesh=mesh, batch_axes="dp", **options)


COLUMNS = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
ONE_HEAD_EACH = {"layers.0": ColwiseParallel(heads=4, replicate_heads=True, output_layouts=Replicate())}


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({0: WIDE}, {"sequence_axes": "tp"}, "gives rank 0 tp=1, but the mesh has tp=2, and 'tp' splits sequences"),
        ({0: WIDE}, {"accumulate": 2, "accumulate_unsharded": True, "is_sharded": True},
         "accumulate_unsharded is not offered with pipeline(shapes=...)"),
        ({1: {"dp": 1, "tp": 4}}, {"tp_plan": COLUMNS},
         "gives rank 1 tp=4, but layers.0 (ColwiseParallel) was split for tp=2, and heads are sure to stay whole only on a part "
         "of those ranks: 2 % 4 = 2. Build the mesh with tp=4"),
        ({0: {"dp": 4, "tp": 2}}, {"sizes": (1, 1, 8), "tp_plan": ONE_HEAD_EACH, "width": 8},
         "has 4 heads, replicated for tp=8: each rank computes one, and 2 ranks cannot share them out (2 % 4 = 2)"),
        ({1: WIDE}, {"width": 6, "is_sharded": True},
         "is sharded over ('dp',), and does not divide on rank 1 of the pipeline, where pipeline(shapes=...) makes "
         "{'dp': 4, 'tp': 1}: 6 % 4 = 2"),
    ],
)  # fmt: skip
def test_models_that_a_shape_does_not_fit(shapes: Any, options: Any, message: str) -> None:
    with pytest.raises(ParallelizeError, match=re.escape(message)):
        step_of(shapes, **options)


def test_stages_on_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpar.train._check_shapes.is_spread", lambda meshes: True)
    with pytest.raises(ParallelizeError, match="is for stages of one process: .* Leave shapes out"):
        step_of({0: WIDE})


def asks_for_sizes(model: Any, batch: Any) -> jax.Array:
    x = (
        batch["x"] @ model.layers[0].kernel[...]
        if jax.lax.axis_size("dp") == 4
        else model.layers[0](batch["x"])
    )
    return model.layers[1](x).mean()


def hands_on_a_mean(model: Any, batch: Any) -> jax.Array:
    x = model.layers[0](batch["x"])
    mean = x.mean()
    return (model.layers[1](x / mean) * mean).mean()


@pytest.mark.parametrize(
    ("loss", "num_rows", "error", "message"),
    [
        (square_loss, 12, BatchError, "a batch of 12 rows does not divide on rank 0 of the pipeline, which by pipeline(shapes=...) splits "
         "it over 4 devices x 2 microbatches: 12 % 8 = 4. Where ranks split the batch over different numbers of devices ([4, 2]), "
         "microbatches must be equal. Pad it to 16 rows"),
        (asks_for_sizes, 16, ParallelizeError, "stage 0 uses other variables, or passes on other values, on a mesh of "
         "{'dp': 4, 'tp': 1} than on one of {'dp': 2, 'tp': 2}"),
        (hands_on_a_mean, 16, ParallelizeError, "pipeline: from stage 0 to stage 1, a value is float64[] on each device of "
         "{'dp': 4, 'tp': 1} and float64[] on each device of {'dp': 2, 'tp': 2}: it differs between the ranks of 'dp'"),
    ],
)  # fmt: skip
def test_batches_and_losses_that_a_shape_does_not_fit(
    loss: Any, num_rows: int, error: type[Exception], message: str
) -> None:
    step = step_of({0: WIDE}, loss=loss)
    with pytest.raises(error, match=re.escape(message)):
        step({name: np.ones((num_rows, 4)) for name in ("x", "y")})
