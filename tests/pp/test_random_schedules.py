"""W5, W7: any order in which a pipeline can run is a schedule; any other is refused by the law that it breaks."""

import io
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar._errors import ScheduleError
from jaxpar.pp import (
    Costs,
    Schedule,
    add_communication,
    add_reduce_grad,
    add_unshard,
    simulate,
    with_bubbles,
    without_bubbles,
)

sys.path.insert(0, str(Path(__file__).parent))
from random_schedules import Plan, can_run, is_ordered, random_plan

seeds = st.integers(0, 2**32 - 1).map(random.Random)
fast = settings(max_examples=100, deadline=None, derandomize=True)


def made(plan: Plan) -> Schedule:
    return Schedule(plan.text(), plan.rank_of_stage)


def law_of(rows: list[list[str]], rank_of_stage: tuple[int, ...]) -> str:
    with pytest.raises(ScheduleError) as error:
        Schedule(rows, rank_of_stage)
    assert f"law '{error.value.law}' broken" in str(error.value)
    return error.value.law


@fast
@given(seeds)
def test_lawful_ones_round_trip_as_they_are_and_lowered(rng: random.Random) -> None:
    plan = random_plan(rng)
    schedule = made(plan)
    lowered = add_communication(add_reduce_grad(add_unshard(schedule)))
    for one in (schedule, lowered, with_bubbles(schedule), without_bubbles(schedule)):
        again = Schedule.from_csv(io.StringIO(one.to_csv()), plan.rank_of_stage)
        assert again == one and hash(again) == hash(one) and again.to_csv() == one.to_csv()
    assert schedule.to_csv().splitlines() == [",".join(row) for row in plan.text()]


@fast
@given(seeds)
def test_simulated_time_does_not_depend_on_how_the_grid_is_written(rng: random.Random) -> None:
    schedule = made(random_plan(rng))
    costs = Costs(F=rng.randint(1, 4), I=rng.randint(1, 4), W=rng.randint(1, 4), latency=rng.randint(0, 3))
    makespans = {
        simulate(s, costs).makespan for s in (schedule, with_bubbles(schedule), add_communication(schedule))
    }
    assert len(makespans) == 1


@fast
@given(seeds)
def test_an_action_that_is_missing_or_twice_breaks_completeness(rng: random.Random) -> None:
    plan = random_plan(rng)
    rows = plan.text()
    rank, step = rng.choice([(r, s) for r, row in enumerate(rows) for s, cell in enumerate(row) if cell])
    cell = rows[rank][step]
    rows[rank][step] = ""
    if any(
        "B" in c or "I" in c or "W" in c for row in rows for c in row
    ):  # else it only goes forward, or is empty
        assert law_of(rows, plan.rank_of_stage) == "completeness"
    rows[rank][step] = cell
    rows[rank].insert(rng.randint(0, len(rows[rank])), cell)
    assert law_of(rows, plan.rank_of_stage) == "completeness"


@fast
@given(seeds)
def test_an_action_in_another_row_breaks_ownership(rng: random.Random) -> None:
    plan = random_plan(rng)
    rows = [*plan.text(), []]
    rank, step = rng.choice([(r, s) for r, row in enumerate(rows) for s, cell in enumerate(row) if cell])
    other = rng.choice([r for r in range(len(rows)) if r != rank])
    rows[other].insert(rng.randint(0, len(rows[other])), rows[rank].pop(step))
    assert law_of(rows, plan.rank_of_stage) == "ownership"


@fast
@given(seeds)
def test_a_shuffled_row_is_refused_exactly_if_it_cannot_run(rng: random.Random) -> None:
    """Against a simulation of its own: `order` if a row contradicts itself, `progress` if rows wait for each other."""
    plan = random_plan(rng)
    row = rng.choice(plan.rows)
    for _ in range(rng.randint(1, 3)):
        i, j = rng.randrange(len(row)), rng.randrange(len(row))
        row[i], row[j] = row[j], row[i]
    if can_run(plan):
        made(plan)
    else:
        assert law_of(plan.text(), plan.rank_of_stage) == ("progress" if is_ordered(plan) else "order")


@fast
@given(seeds)
def test_a_message_that_is_missing_breaks_matching_and_a_swap_is_noticed(rng: random.Random) -> None:
    plan = random_plan(rng)
    lowered = add_communication(made(plan))
    rows = [["" if a is None else str(a) for a in row] for row in lowered.rows]
    messages = [
        (r, s) for r, row in enumerate(rows) for s, cell in enumerate(row) if "SEND" in cell or "RECV" in cell
    ]
    if not messages:
        return
    rank, step = rng.choice(messages)
    cell = rows[rank][step]
    rows[rank][step] = ""
    has_others = len(messages) > 1
    assert not has_others or law_of(rows, plan.rank_of_stage) == "matching"
    rows[rank][step] = cell
    same_row = [s for r, s in messages if r == rank and s != step]
    if same_row:
        other = rng.choice(same_row)
        rows[rank][step], rows[rank][other] = rows[rank][other], rows[rank][step]
        try:
            Schedule(rows, plan.rank_of_stage)
        except ScheduleError as error:
            assert error.law in ("order", "progress")


def test_these_tests_can_fail() -> None:
    """The random plans reach every verdict."""
    verdicts = set()
    for seed in range(200):
        rng = random.Random(seed)
        plan = random_plan(rng)
        row = rng.choice(plan.rows)
        i, j = rng.randrange(len(row)), rng.randrange(len(row))
        row[i], row[j] = row[j], row[i]
        verdicts.add((can_run(plan), is_ordered(plan)))
    assert verdicts == {(True, True), (False, True), (False, False)}
