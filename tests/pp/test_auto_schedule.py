"""The search is lawful, fits its memory limit, and is never slower than a named schedule that fits."""

import math
import random

import pytest

from jaxpar._errors import ScheduleError
from jaxpar.pp import Costs, Schedule, auto_schedule, get_schedule, schedule_names, simulate

NUM_DRAWS = 200


def draw(seed: int) -> tuple[int, int, int, Costs, float | None]:
    rng = random.Random(seed)
    p, v = rng.choice(((2, 1), (3, 1), (4, 1), (2, 2), (3, 2)))
    kept = rng.choice((None, rng.uniform(0, 1)))
    costs = Costs(
        F=rng.uniform(0.5, 2), I=rng.uniform(0.5, 2), W=rng.uniform(0.2, 2), latency=rng.choice((0, rng.uniform(0, 0.5))),
        B=rng.choice((None, rng.uniform(0.5, 3))), kept_for_W=kept,
    )  # fmt: skip
    return (
        p,
        rng.randint(1, 2 * p),
        v,
        costs,
        rng.choice((None, float(v), p * v / 2 + 1, float(p * v), 2.0 * p * v)),
    )


def named(p: int, m: int, v: int) -> list[Schedule]:
    found = []
    for name in schedule_names(stages_per_rank=v):
        try:
            found.append(get_schedule(name, p, m, stages_per_rank=v))
        except ScheduleError as error:
            assert error.law == "definition"
    return [schedule for schedule in found if not schedule.is_forward_only]


@pytest.mark.parametrize("part", range(4))
def test_never_slower_than_any_named_schedule_that_fits(part: int) -> None:
    num_faster = 0
    for seed in range(part * NUM_DRAWS // 4, (part + 1) * NUM_DRAWS // 4):
        p, m, v, costs, limit = draw(seed)
        schedule = auto_schedule(p, m, costs, limit, stages_per_rank=v)
        ours = simulate(schedule, costs)
        assert (schedule.n_ranks, schedule.n_stages, schedule.n_microbatches) == (p, p * v, m)
        most = math.inf if limit is None else limit
        assert max(ours.peak) <= most * (1 + 1e-9)
        timelines = [simulate(other, costs) for other in named(p, m, v)]
        fitting = [timeline.makespan for timeline in timelines if max(timeline.peak) <= most * (1 + 1e-9)]
        assert ours.makespan <= min(fitting, default=math.inf) * (1 + 1e-12)
        num_faster += ours.makespan < min(fitting, default=math.inf) * (1 - 1e-9)
    assert num_faster >= 10  # it is a search, not a lookup


def test_the_zero_bubble_schedules_are_found_from_costs() -> None:
    """At F = I = W the makespan 3m + p - 1 is the least there is: nobody can start earlier than the skew."""
    for p, m in ((2, 4), (4, 8), (4, 16)):
        assert simulate(auto_schedule(p, m, Costs(), p)).makespan == 3 * m + p - 1
        assert simulate(auto_schedule(p, m, Costs(), 2 * p, stages_per_rank=2)).makespan == 6 * m + p - 1


def test_less_memory_costs_time_never_correctness() -> None:
    makespans = [simulate(auto_schedule(4, 8, Costs(), limit)).makespan for limit in (1, 2, 3, 4, None)]
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[0] == 8 * (4 * 2 + 1)  # rank 0 has its one slot back when the microbatch has come round
    assert makespans[-1] == 27


def test_latency_is_hidden_by_more_activations() -> None:
    costs = Costs(latency=0.5)
    found = simulate(auto_schedule(4, 16, costs), costs)
    assert found.makespan < min(
        simulate(get_schedule(name, 4, 16), costs).makespan for name in ("1F1B", "ZBH1")
    )


def test_a_limit_for_each_rank_and_a_settled_placement() -> None:
    schedule = auto_schedule(2, 4, Costs(), (3.0, 1.0))
    assert simulate(schedule).peak[1] == 1
    assert auto_schedule(2, 4, Costs(), rank_of_stage=(0, 1, 1, 0)).rank_of_stage == (0, 1, 1, 0)
    assert auto_schedule(2, 4, Costs(), rank_of_stage=(0, 0, 1)).n_stages == 3


def test_a_large_problem_is_judged_on_fewer_microbatches() -> None:
    costs = Costs(F=1.0, I=1.3, W=0.7, latency=0.1)
    found = simulate(auto_schedule(4, 140, costs, 4), costs)
    assert found.makespan <= simulate(get_schedule("ZBH1", 4, 140), costs).makespan


@pytest.mark.parametrize(
    ("options", "law", "message"),
    [
        ({"n_ranks": 0}, "definition", "n_ranks=0 must be at least 1"),
        ({"n_microbatches": 0}, "definition", "n_microbatches=0 must be at least 1"),
        ({"stages_per_rank": 0}, "definition", "stages_per_rank=0 must be at least 1"),
        (
            {"memory_limit": 0.5},
            "memory",
            r"one microbatch needs 1 there, memory_limit is 0.5. Write memory_limit=1",
        ),
        ({"memory_limit": (1, 2, 3)}, "definition", "memory_limit has 3 numbers for 2 ranks"),
        ({"rank_of_stage": (0, 0)}, "definition", "must name each rank 0 to 1 at least once"),
        ({"costs": Costs(F=(1.0, 2.0, 3.0))}, "definition", "F has 3 numbers, but the schedule has 2 stages"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(options: dict, law: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as error:
        auto_schedule(**{"n_ranks": 2, "n_microbatches": 2, "costs": Costs(), **options})
    assert error.value.law == law
