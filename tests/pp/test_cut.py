"""Laws of the cut: pieces in a row are the program, each computation is done once, and only what must travel travels.

Programs here mark the entries of stages by hand where the law is about data flow, and by split points where it is about
models. In `homes` each computation is known by a constant of its own: `x * 3.0` is "the computation 3".
"""

import collections
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar import _compat
from jaxpar._errors import ParallelizeError
from jaxpar.mesh import init_device_mesh
from jaxpar.pp import get_schedule, pipeline, plan_of
from jaxpar.pp._cut import Piece, cut
from jaxpar.pp._inline import trace
from jaxpar.pp._split_points import balanced_splits, check_splits, mark_splits

mark = _compat.mark_stage


def pieces_of(
    fn: Callable[..., list[Any]],
    state: Sequence[Any],
    batch: Sequence[Any],
    n_stages: int,
    updates: Sequence[tuple[int, int]] = (),
) -> tuple[Piece, ...]:
    is_state = [True] * len(state) + [False] * len(batch)
    return cut(trace(fn, *state, *batch), is_state, n_stages, updates)


def composed(pieces: Sequence[Piece], inputs: Sequence[Any]) -> list[Any]:
    """Run the pieces one after the other."""
    results, received = {}, []
    for piece in pieces:
        run = _compat.as_function(piece.program.jaxpr, piece.program.consts)
        assert len(received) == piece.num_received
        outputs = run(*(inputs[i] for i in piece.reads), *received)
        received = outputs[: piece.num_sent]
        results |= dict(zip(piece.results, outputs[piece.num_sent :], strict=True))
    return [results[i] for i in sorted(results)]


def homes(pieces: Sequence[Piece]) -> dict[int, list[int]]:
    """The stages in which each computation is done, by its constant."""
    found = collections.defaultdict(list)
    for stage, piece in enumerate(pieces):
        for equation in piece.program.jaxpr.eqns:
            constants = [a for a in equation.invars if _compat.is_literal(a)]
            if equation.primitive.name == "mul" and constants:
                found[int(constants[0].val)].append(stage)
    return dict(found)


def sent(pieces: Sequence[Piece]) -> list[list[str]]:
    """Types of what each stage sends."""
    return [[str(v.aval) for v in piece.program.jaxpr.outvars[: piece.num_sent]] for piece in pieces]


x, w = jnp.arange(1.0, 4.0), jnp.array([2.0, 3.0, 5.0])


# Where computations go


def test_pieces_compose_to_the_program_and_stages_meet_at_the_marks() -> None:
    def fn(w: Any, x: Any) -> list[Any]:
        h = mark(w * x * 3.0, 1)
        return [mark(h * 5.0, 2).sum() * 7.0]

    pieces = pieces_of(fn, [w], [x], 3)
    assert homes(pieces) == {3: [0], 5: [1], 7: [2]}
    assert sent(pieces) == [["float32[3]"], ["float32[3]"], []]
    np.testing.assert_array_equal(composed(pieces, [w, x])[0], fn(w, x)[0])


def test_one_stage_is_the_program() -> None:
    pieces = pieces_of(lambda w, x: [(w * x).sum(), w], [w], [x], 1)
    assert (len(pieces), pieces[0].num_sent, pieces[0].num_received) == (1, 0, 0)


def test_what_comes_of_batch_or_parameters_alone_never_travels() -> None:
    """A mask and the transpose of a tied weight are made again in each stage that uses them."""

    def fn(w: Any, x: Any) -> list[Any]:
        mask, cast = jnp.outer(x, x) * 11.0, w * 13.0
        h = mark((mask @ (w * x)) * cast, 1)
        h = mark(mask @ h, 2)
        return [((mask @ h) * cast).sum()]

    pieces = pieces_of(fn, [w], [x], 3)
    assert homes(pieces) == {11: [0, 1, 2], 13: [0, 2]}
    assert sent(pieces) == [["float32[3]"], ["float32[3]"], []]
    assert [piece.reads for piece in pieces] == [(0, 1), (1,), (0, 1)]
    np.testing.assert_allclose(composed(pieces, [w, x])[0], fn(w, x)[0], rtol=1e-6)


def test_a_marked_mask_is_still_of_the_batch_alone() -> None:
    """A block marks all its arguments, its mask too."""

    def fn(w: Any, x: Any) -> list[Any]:
        mask = x * 11.0
        h, mask_1 = mark(w * x, 1), mark(mask, 1)
        h, mask_2 = mark(h * mask_1, 2), mark(mask, 2)
        return [(h * mask_2).sum()]

    pieces = pieces_of(fn, [w], [x], 3)
    assert homes(pieces) == {11: [1, 2]}
    assert [piece.num_sent for piece in pieces] == [1, 1, 0]
    np.testing.assert_array_equal(composed(pieces, [w, x])[0], fn(w, x)[0])


def test_an_embedding_goes_to_the_first_stage_that_uses_it() -> None:
    """Of parameters and batch, behind no mark: 3 for stage 0, 5 for stage 2 alone, 7 for stages 1 and 2."""

    def fn(w: Any, x: Any) -> list[Any]:
        first, late, middle = w * x * 3.0, (w + x) * 5.0, (w - x) * 7.0
        h = mark(first, 1) * middle
        return [(mark(h, 2) * late * middle).sum()]

    pieces = pieces_of(fn, [w], [x], 3)
    assert homes(pieces) == {3: [0], 5: [2], 7: [1]}
    assert [piece.num_sent for piece in pieces] == [1, 2, 0]
    np.testing.assert_array_equal(composed(pieces, [w, x])[0], fn(w, x)[0])


def test_a_skip_connection_is_relayed_by_every_stage_between() -> None:
    def fn(w: Any, x: Any) -> list[Any]:
        h = skip = w * x
        for stage in (1, 2, 3):
            h = mark(h, stage) * (stage + 2.0)
        return [(h + skip).sum()]

    pieces = pieces_of(fn, [w], [x], 4)
    assert [piece.num_sent for piece in pieces] == [1, 2, 2, 0]  # stage 0 sends one value, used twice
    assert homes(pieces) == {3: [1], 4: [2], 5: [3]}
    np.testing.assert_array_equal(composed(pieces, [w, x])[0], fn(w, x)[0])


def test_a_value_that_many_stages_use_travels_once_and_no_further_than_needed() -> None:
    def fn(w: Any, x: Any) -> list[Any]:
        shared = w * x * 3.0
        h = mark(jnp.sin(shared), 1)
        h = mark(h * shared, 2)
        h = mark(h * shared + shared, 3)
        return [h.sum()]

    pieces = pieces_of(fn, [w], [x], 4)
    assert homes(pieces) == {3: [0]}
    assert [piece.num_sent for piece in pieces] == [2, 2, 1, 0]


def test_what_enters_a_stage_and_goes_on_to_later_ones_travels_once() -> None:
    """Under its name before the mark and under the one behind it."""

    def fn(w: Any, x: Any) -> list[Any]:
        before = w * x
        behind = mark(before, 1)
        h = mark(jnp.sin(behind), 2)
        return [(h * before * behind).sum()]

    pieces = pieces_of(fn, [w], [x], 3)
    assert [piece.num_sent for piece in pieces] == [1, 2, 0]
    np.testing.assert_array_equal(composed(pieces, [w, x])[0], fn(w, x)[0])


def test_results_come_from_the_stage_that_makes_them() -> None:
    """A metric of stage 0; a count of the batch alone; a parameter as a metric; a new variable; one that stays; a constant."""

    def fn(w: Any, c: Any, x: Any) -> list[Any]:
        h = w * x
        metric = h.max()
        h = mark(h, 1) * 3.0
        return [h.sum(), metric, (x > 1).sum(), w, c + h.mean(), w, jnp.float32(5.0)]

    inputs = [w, jnp.float32(1.0), x]
    pieces = pieces_of(fn, inputs[:2], inputs[2:], 2, updates=[(1, 4), (0, 5)])
    assert [piece.results for piece in pieces] == [(1, 2, 3, 6), (0, 4)]
    expected = [y for i, y in enumerate(fn(*inputs)) if i != 5]
    for ours, theirs in zip(composed(pieces, inputs), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_all_stages_that_read_a_variable_make_its_new_value() -> None:
    """A count that stages 0 and 2 read, one that takes its value from another, and a variable that becomes a constant."""

    def fn(count: Any, other: Any, flag: Any, w: Any, x: Any) -> list[Any]:
        h = mark(w * x * count, 1)
        h = mark(jnp.sin(h) * other, 2)
        return [(h * (count + 1.0) * flag).sum(), count * 3.0, count, jnp.float32(0.0)]

    inputs = [jnp.float32(2.0), jnp.float32(3.0), jnp.float32(4.0), w, x]
    pieces = pieces_of(fn, inputs[:4], inputs[4:], 3, updates=[(0, 1), (1, 2), (2, 3)])
    # Stage 1 reads `other`, whose next value is `count`: so it reads `count` and follows that too.
    assert [set(piece.results) - {0} for piece in pieces] == [{1}, {1, 2}, {1, 3}]
    for ours, theirs in zip(composed(pieces, inputs), fn(*inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def read_late(c: Any, w: Any, x: Any) -> list[Any]:
    h = w * x
    return [(mark(h, 1) * c).sum(), c * 0.9 + h.mean()]


def updated_twice(c: Any, w: Any, x: Any) -> list[Any]:
    first = c * 0.9 + (w * x).mean()
    h = mark(w * x / first, 1)
    return [h.sum(), first * 0.9 + h.mean()]


@pytest.mark.parametrize(("fn", "writer", "reader"), [(read_late, 0, 1), (updated_twice, 1, 0)])
def test_a_variable_that_one_stage_changes_and_another_reads_is_refused(
    fn: Any, writer: int, reader: int
) -> None:
    with pytest.raises(
        ParallelizeError, match=rf"stage {writer} changes a variable.* stage {reader} reads too"
    ):
        pieces_of(fn, [jnp.float32(1.0), w], [x], 2, updates=[(0, 1)])


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed: int) -> None:
    """Pieces compose; what depends on a mark or mixes parameters and batch is computed in exactly one stage."""
    rng = random.Random(seed)
    n_stages = rng.randint(2, 5)
    state, batch = [jnp.float32(rng.uniform(0.5, 1)) for _ in range(3)], [jnp.float32(0.7), jnp.float32(1.1)]
    made_of: dict[int, set[str]] = {}

    def fn(*inputs: Any) -> list[Any]:
        values = [(v, {"s"} if i < len(state) else {"b"}) for i, v in enumerate(inputs)]
        chain, number = (inputs[0] + inputs[-1], {"s", "b"}), 2
        for stage in range(n_stages):
            if stage:
                chain = mark(chain[0], stage), chain[1]
            for _ in range(rng.randint(2, 5)):
                (one, of_one), (two, of_two) = rng.choice(values), rng.choice([*values, chain])
                made_of[number] = of_one | of_two
                values.append((jnp.sin(one + two) * float(number), made_of[number]))
                number += 1
            made_of[number] = {"s", "b"}
            chain = (chain[0] + values[-1][0] + rng.choice(values)[0]) * float(number), {"s", "b"}
            number += 1
            values.append(chain)
        return [chain[0], values[7][0], values[-2][0]]

    program = trace(fn, *state, *batch)
    pieces = cut(program, [True] * 3 + [False] * 2, n_stages)
    inputs = [*state, *batch]
    for ours, theirs in zip(
        composed(pieces, inputs),
        _compat.as_function(program.jaxpr, program.consts)(*inputs),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    for number, stages in homes(pieces).items():
        assert len(made_of[number]) == 1 or len(stages) == 1, (number, stages)
        assert len(set(stages)) == len(stages)


def test_a_value_that_a_stage_makes_for_itself_counts_as_its_work() -> None:
    """Parameters of a stage stay there: each is read by the stages that use it, and by no other."""

    def fn(a: Any, b: Any, c: Any, x: Any) -> list[Any]:
        h = mark(a * x, 1)
        h = mark(h * (b * 3.0), 2)
        return [(h * c * a).sum()]

    assert [p.reads for p in pieces_of(fn, [w, w, w], [x], 3)] == [(0, 3), (1,), (0, 2)]


# What cannot be cut


@pytest.mark.parametrize(
    ("fn", "n_stages", "message"),
    [
        (lambda w, x: [mark(w * x, 1).sum()], 3, "beginning of stage 2 was never reached"),
        (
            lambda w, x: [mark(mark(w * x, 2) * 2.0, 1).sum()],
            3,
            "stage 1 begins behind stage 2.*not in the order",
        ),
        (lambda w, x: [mark(mark(w * x, 1) * 2.0, 1).sum()], 2, "stage 1 is entered twice"),
        (lambda w, x: [mark(mark(w * x, 1), 2).sum()], 3, "stage 1 of 3 has nothing to do"),
        (lambda w, x: [mark(x, 1).sum() + w.sum()], 2, "stage 1 of 2 has nothing to do.*of the batch alone"),
    ],
    ids=["missing", "out-of-order", "twice", "empty-middle", "batch-alone"],
)
def test_what_cannot_be_cut_is_refused(fn: Any, n_stages: int, message: str) -> None:
    with pytest.raises(ParallelizeError, match=message):
        pieces_of(fn, [w], [x], n_stages)


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


def test_the_end_of_a_module_is_the_beginning_of_the_next() -> None:
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
    """Megatron-LM#1304: 30 layers on 4 stages of 7 lose 2 of them."""
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
        balanced_splits(Stack([AddOne()] * 3), 4)
    with pytest.raises(ParallelizeError, match="longest list of modules in Scale is missing.*split_spec="):
        balanced_splits(Scale(1.0), 2)


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
    mesh = init_device_mesh((2,), ("pp",), devices=jax.devices()[:2])
    plan = plan_of(pipeline(Stack([Scale(1.0)] * 5), mesh["pp"], schedule=schedule, n_microbatches=4))
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
    mesh = init_device_mesh((2, 2), ("pp", "dp"), devices=jax.devices()[:4])
    model = Stack([Scale(1.0)] * 5)
    with pytest.raises(ParallelizeError, match=message):
        pipeline(model, mesh["pp"], **options)
    assert plan_of(model) is None


def test_stages_lie_along_one_axis() -> None:
    mesh = init_device_mesh((2, 2), ("pp", "dp"), devices=jax.devices()[:4])
    with pytest.raises(ParallelizeError, match=r"axes \('pp', 'dp'\). Write pipeline\(model, mesh\['pp'\]\)"):
        pipeline(Stack([Scale(1.0)] * 2), mesh, n_microbatches=2)
