"""Laws of the cut: pieces in a row are the program, each computation is done once, and only what must travel travels.

Programs here mark the entries of stages by hand where the law is about data flow, and by split points where it is about
models. In `homes` each computation is known by a constant of its own: `x * 3.0` is "the computation 3".
"""

import random
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import _compat
from jaxpar._errors import ParallelizeError
from jaxpar.pp._cut import cut
from jaxpar.pp._inline import trace

sys.path.insert(0, str(Path(__file__).parent))
from pieces import composed, homes, mark, pieces_of, sent, w, x

# Where computations go


def test_pieces_compose_to_the_program_and_stages_meet_at_the_marks() -> None:
    """PP1."""

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
    """W8."""

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
