"""Models are cut where their split points say: modules by name, lists balanced, what cannot be cut refused by name."""

import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar.mesh import init_device_mesh
from jaxpar.pp import get_schedule, pipeline, plan_of
from jaxpar.pp._balance import balanced_splits
from jaxpar.pp._cut import Piece
from jaxpar.pp._split_points import check_splits, mark_splits

sys.path.insert(0, str(Path(__file__).parent))
from pieces import composed, pieces_of, w, x

# Models


class AddOne(nnx.Module):
    def __init__(self) -> None:
        self.one = nnx.Param(jnp.float32(1.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.one


class Scale(nnx.Module):
    def __init__(self, value: Any) -> None:
        self.scale = nnx.Param(jnp.float32(value))

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        return x * self.scale * (1.0 if mask is None else mask)


class Stack(nnx.Module):
    """Layers one after the other, called as `call` says."""

    def __init__(self, layers: Sequence[nnx.Module], call: Callable[..., Any] | None = None) -> None:
        self.layers = nnx.List(layers)
        self.call = call

    def __call__(self, x: jax.Array, **kwargs: Any) -> jax.Array:
        for layer in self.layers:
            x = layer(x, **kwargs) if self.call is None else self.call(layer, x)
        return x


def model_pieces(
    model: nnx.Module, splits: Any, batch: Sequence[Any], call: Callable[..., Any] | None = None
) -> tuple[tuple[Piece, ...], list[Any], Any]:
    """The pieces of `call(model, *batch)`, the inputs of the program, and what the model itself gives."""
    call = call or (lambda model, x: model(x))
    expected = call(model, *batch)
    graphdef, params = nnx.split(model)
    leaves, treedef = jax.tree.flatten(params)

    def fn(*flat: Any) -> list[Any]:
        merged = nnx.merge(graphdef, jax.tree.unflatten(treedef, flat[: len(leaves)]))
        mark_splits(merged, splits, lambda: None)
        return [call(merged, *flat[len(leaves) :])]

    return pieces_of(fn, leaves, batch, len(splits) + 1), [*leaves, *batch], expected


def test_keyword_arguments_reach_the_stage_that_asks_for_them() -> None:
    model = Stack([Scale(2.0), Scale(3.0), Scale(5.0)])
    splits = (("layers.1", "beginning"), ("layers.2", "beginning"))
    pieces, inputs, expected = model_pieces(model, splits, [x, w], lambda m, x, mask: m(x, mask=mask))
    assert [piece.num_sent for piece in pieces] == [1, 1, 0]
    np.testing.assert_array_equal(composed(pieces, inputs)[0], expected)


class Passes(nnx.Module):
    """Takes a dict with integers, booleans and a tuple in it, and gives another."""

    def __init__(self, factor: float) -> None:
        self.scale = nnx.Param(jnp.float32(factor))

    def __call__(self, state: dict[str, Any]) -> dict[str, Any]:
        hidden, (places, is_on) = state["hidden"], state["about"]
        return {"hidden": jnp.where(is_on, hidden * self.scale, hidden), "about": (places + 1, is_on ^ True)}


def test_any_pytree_crosses() -> None:
    """W8: where PyTorch's stages take and give tensors alone. Integers and booleans that the model makes go from stage to stage."""

    def call(model: Any, x: jax.Array) -> jax.Array:
        out = model(
            {"hidden": x, "about": (jnp.argsort(x * model.layers[0].scale), x * model.layers[0].scale > 3)}
        )
        return out["hidden"] * out["about"][0] + out["about"][1]

    model = Stack([Passes(2.0), Passes(3.0), Passes(5.0)])
    pieces, inputs, expected = model_pieces(
        model, (("layers.1", "beginning"), ("layers.2", "beginning")), [x], call
    )
    assert [piece.num_sent for piece in pieces] == [3, 3, 0]
    np.testing.assert_array_equal(composed(pieces, inputs)[0], expected)


def test_the_end_of_a_module_is_the_beginning_of_the_next() -> None:
    """PP1: both kinds of split points."""
    model = Stack([Scale(2.0), Scale(3.0), Scale(5.0)])
    shapes = []
    for splits in ((("layers.0", "end"),), (("layers.1", "beginning"),)):
        pieces, inputs, expected = model_pieces(model, splits, [x])
        np.testing.assert_array_equal(composed(pieces, inputs)[0], expected)
        shapes.append([(p.reads, p.num_sent, len(p.program.jaxpr.eqns)) for p in pieces])
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("wrap", [nnx.jit, jax.jit], ids=["nnx.jit", "jax.jit"])
def test_jitted_calls_are_cut_through(wrap: Any) -> None:
    model = Stack([Scale(2.0), Stack([Scale(3.0), Scale(5.0)]), Scale(7.0)])
    call = nnx.jit(lambda m, x: m(x)) if wrap is nnx.jit else lambda m, x: jax.jit(lambda x: m(x))(x)
    pieces, inputs, expected = model_pieces(model, (("layers.1.layers.1", "beginning"),), [x], call)
    assert [piece.num_sent for piece in pieces] == [1, 0]
    assert [len(piece.reads) for piece in pieces] == [3, 2]
    np.testing.assert_array_equal(composed(pieces, inputs)[0], expected)


def scanned(layer: nnx.Module, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (layer(x), None), x, length=2)[0]


def checkpointed(layer: nnx.Module, x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda x: layer(x))(x)


def conditional(layer: nnx.Module, x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0] > 0, lambda: layer(x), lambda: x)


@pytest.mark.parametrize("call", [scanned, checkpointed, conditional])
def test_a_split_point_inside_a_loop_a_branch_or_a_checkpoint_is_refused(call: Any) -> None:
    model = Stack([Scale(2.0), Scale(3.0)], call)
    with pytest.raises(
        ParallelizeError, match=r"stage 1 was never reached.*jax.lax.scan, jax.lax.cond, jax.checkpoint or"
    ):
        model_pieces(model, (("layers.1", "beginning"),), [x])


@pytest.mark.parametrize("call", [scanned, checkpointed, conditional])
def test_a_loop_a_branch_or_a_checkpoint_within_a_stage_stays_whole(call: Any) -> None:
    model = Stack([Scale(2.0), Stack([Scale(3.0)], call), Scale(5.0)])
    pieces, inputs, expected = model_pieces(
        model, (("layers.1", "beginning"), ("layers.2", "beginning")), [x]
    )
    np.testing.assert_array_equal(composed(pieces, inputs)[0], expected)


def test_a_module_that_is_called_twice_begins_no_stage() -> None:
    layer = Scale(2.0)
    with pytest.raises(ParallelizeError, match="stage 1 is entered twice"):
        model_pieces(Stack([layer, layer]), (("layers.0", "beginning"),), [x], lambda m, x: m.layers[0](m(x)))


# Split points


@pytest.mark.parametrize(
    ("num_layers", "n_stages", "sizes"),
    [(30, 4, (8, 8, 7, 7)), (5, 2, (3, 2)), (10, 8, (2, 2, 1, 1, 1, 1, 1, 1)), (4, 4, (1, 1, 1, 1))],
)
def test_layers_that_do_not_divide_are_all_there(
    num_layers: int, n_stages: int, sizes: tuple[int, ...]
) -> None:
    """Case PP-5, Megatron-LM#1304: 30 layers on 4 stages of 7 lose 2 of them."""
    model = Stack([AddOne() for _ in range(num_layers)])
    splits = balanced_splits(model, n_stages)
    pieces, inputs, _ = model_pieces(model, splits, [jnp.zeros(3)])
    assert composed(pieces, inputs)[0].tolist() == [num_layers] * 3
    starts = [0, *(int(name.split(".")[1]) for name, _ in splits), num_layers]
    assert sorted(np.diff(starts), reverse=True) == list(sizes)


@pytest.mark.parametrize("widths", [(4, 1, 1, 1, 1, 4, 4), (1, 1, 1, 9), (9, 1, 1, 1), (2, 7, 1, 8, 2, 8)])
def test_the_heaviest_stage_is_as_light_as_can_be(widths: tuple[int, ...]) -> None:
    layers = [Scale(jnp.ones(width)) for width in widths]
    starts = [int(name.split(".")[1]) for name, _ in balanced_splits(Stack(layers), 3)]

    def heaviest(starts: Sequence[int]) -> int:
        return max(sum(part) for part in np.split(np.array(widths), starts))

    all_starts = list(itertools.combinations(range(1, len(widths)), 2))
    assert tuple(starts) in all_starts  # ascending, no stage empty
    assert heaviest(starts) == min(map(heaviest, all_starts))


def test_functions_among_the_layers_stay_with_the_module_before_them() -> None:
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(3, 3, rngs=rngs), jax.nn.relu, nnx.Linear(3, 3, rngs=rngs), jax.nn.relu, jax.nn.gelu]
    model = nnx.Sequential(*layers, nnx.Linear(3, 3, rngs=rngs))
    assert [name for name, _ in balanced_splits(model, 3)] == ["layers.2", "layers.5"]
    with pytest.raises(
        ParallelizeError, match="n_stages=4, but .* layers with 3 modules.*n_stages=3 or fewer"
    ):
        balanced_splits(model, 4)


def test_lists_of_lists_are_cut_between_modules_that_are_called() -> None:
    model = Stack([nnx.List([Scale(1.0), Scale(1.0)]) for _ in range(4)])
    assert [name for name, _ in balanced_splits(model, 2)] == ["layers.0.1"]
    with pytest.raises(
        ParallelizeError, match=r"'layers.2', a List, which is not called.*\['layers.2.0', 'layers.2.1'\]"
    ):
        check_splits(model, {"layers.2": "beginning"})


def test_fewer_layers_than_stages_is_refused_with_both_numbers() -> None:
    with pytest.raises(ParallelizeError, match="n_stages=4, but .* Stack is layers with 3 modules"):
        balanced_splits(Stack([AddOne() for _ in range(3)]), 4)
    with pytest.raises(ParallelizeError, match="longest list of modules in Scale is missing.*split_spec="):
        balanced_splits(Scale(1.0), 2)
    with pytest.raises(ParallelizeError, match="layers with 1 modules"):
        balanced_splits(Stack([AddOne()] * 3), 2)


def test_split_points_that_do_not_exist_name_the_nearest() -> None:
    wrong: Any = {"layers.1": "middle"}
    model = Stack([Scale(1.0), Scale(1.0)])
    with pytest.raises(ParallelizeError, match=r"'layer.1', but Stack has no.*'layers.1'"):
        check_splits(model, {"layer.1": "beginning"})
    with pytest.raises(ParallelizeError, match=r"no module of that name. It has \['layers"):
        check_splits(model, {"": "beginning"})
    with pytest.raises(ParallelizeError, match=r"split_spec\['layers.1'\] is 'middle'; write"):
        check_splits(model, wrong)


# `pipeline`


def test_pipeline_returns_the_same_object_and_changes_nothing_outside_a_step() -> None:
    mesh = init_device_mesh((2,), ("pp",), devices=jax.devices()[:2])
    model = Stack([Scale(2.0), Scale(3.0)])
    assert pipeline(model, mesh["pp"], n_microbatches=4) is model
    plan = plan_of(model)
    assert plan is not None and plan.splits == (("layers.1", "beginning"),)
    np.testing.assert_array_equal(model(x), 6 * x)


@pytest.mark.parametrize(("schedule", "n_stages"), [("1F1B", 2), ("Interleaved1F1B", 4), ("ZBV", 4)])
def test_by_default_there_are_as_many_stages_as_the_schedule_is_about(schedule: str, n_stages: int) -> None:
    """PP2: the plan says how many there are, and where they begin."""
    mesh = init_device_mesh((2,), ("pp",), devices=jax.devices()[:2])
    plan = plan_of(
        pipeline(Stack([Scale(1.0) for _ in range(5)]), mesh["pp"], schedule=schedule, n_microbatches=4)
    )
    assert plan is not None and plan.schedule.n_stages == n_stages == len(plan.splits) + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_stages": 2, "split_spec": {"layers.1": "beginning"}, "n_microbatches": 2}, "not both"),
        ({"n_stages": 2}, "how many microbatches. Write n_microbatches=8"),
        ({"n_stages": 3, "n_microbatches": 2}, r"3 stages do not divide among 2 ranks \(3 % 2 = 1\)"),
        ({"n_stages": 2, "schedule": get_schedule("1F1B", 3, 2)}, "schedule is for 3 ranks, but there are 2"),
        ({"n_stages": 4, "schedule": get_schedule("1F1B", 2, 2)}, "for 2 stages, but there are 4"),
        ({"schedule": get_schedule("1F1B", 2, 2), "n_microbatches": 4}, "n_microbatches=4, but .* is for 2"),
        ({"split_spec": {"layer.1": "beginning"}, "n_microbatches": 2}, "Near it are"),
        ({"n_stages": 8, "n_microbatches": 2}, "n_stages=8, but the longest list"),
    ],
    ids=["both", "microbatches", "divide", "ranks", "stages", "other-microbatches", "unknown", "too-many"],
)
def test_what_cannot_be_a_pipeline_is_refused(options: dict[str, Any], message: str) -> None:
    """PP1."""
    mesh = init_device_mesh((2, 2), ("pp", "dp"), devices=jax.devices()[:4])
    model = Stack([Scale(1.0) for _ in range(5)])
    with pytest.raises(ParallelizeError, match=message):
        pipeline(model, mesh["pp"], **options)
    assert plan_of(model) is None


def test_stages_lie_along_one_axis() -> None:
    mesh = init_device_mesh((2, 2), ("pp", "dp"), devices=jax.devices()[:4])
    with pytest.raises(ParallelizeError, match=r"axes \('pp', 'dp'\). Write pipeline\(model, mesh\['pp'\]\)"):
        pipeline(Stack([Scale(1.0)] * 2), mesh, n_microbatches=2)
