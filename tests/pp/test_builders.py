"""Every named schedule is lawful for all numbers for which it is defined, and has the memory that it promises."""

import itertools

import pytest

from jaxpar._errors import ScheduleError
from jaxpar.pp import Costs, Schedule, get_schedule, schedule_names, simulate, without_bubbles

RANKS, MICROBATCHES, STAGES = range(1, 9), range(1, 33), range(1, 5)

# When a schedule refuses its numbers: the documented rule, written down a second time.
STAGES_PER_RANK = {
    "GPipe": (1,), "1F1B": (1,), "Eager1F1B": (1,), "LockStep1F1B": (1,), "ZBH1": (1,), "ZBH2": (1,), "ZBVZeroBubble": (2,), "DualPipeV": (2,),
    "LoopedBFS": STAGES, "Interleaved1F1B": STAGES, "InterleavedZeroBubble": STAGES, "ForwardOnly": STAGES,
}  # fmt: skip


def is_defined(name: str, p: int, m: int, v: int) -> bool:
    if v not in STAGES_PER_RANK[name]:
        return False
    if name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return m % max(1, m // p) == 0
    return name != "DualPipeV" or m >= 2 * p


def test_every_schedule_is_listed_here() -> None:
    assert set(schedule_names()) == set(STAGES_PER_RANK)
    assert schedule_names(stages_per_rank=2) == (
        "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "ForwardOnly",
    )  # fmt: skip


@pytest.mark.parametrize("name", STAGES_PER_RANK)
def test_all_laws_hold_wherever_it_is_defined(name: str) -> None:
    """Schedule proves the laws when it is made; here every number is either lawful or refused by the rule."""
    for p, m, v in itertools.product(RANKS, MICROBATCHES, STAGES):
        if not is_defined(name, p, m, v):
            with pytest.raises(ScheduleError, match=f"get_schedule: {name} is defined") as error:
                get_schedule(name, p, m, stages_per_rank=v)
            assert error.value.law == "definition"
            continue
        schedule = get_schedule(name, p, m, stages_per_rank=v)
        assert (schedule.n_ranks, schedule.n_stages, schedule.n_microbatches) == (p, p * v, m)
        _check_peak(name, schedule, v)


def _check_peak(name: str, schedule: Schedule, v: int) -> None:
    p, m = schedule.n_ranks, schedule.n_microbatches
    held, until_inputs = schedule.peak_live(), schedule.peak_live(until="I")
    group = m // max(1, m // p)
    if name in ("GPipe", "LoopedBFS"):
        assert held == (v * m,) * p
    elif name == "1F1B":
        assert held == tuple(min(m, p - r) for r in range(p))
    elif name == "Eager1F1B":
        assert held == tuple(min(m, 2 * (p - r) - 1) for r in range(p))
    elif name == "LockStep1F1B":
        assert held == tuple(min(m, 2 * (p - r)) for r in range(p))
    elif name == "Interleaved1F1B":
        assert held == tuple(min(v * m, (v - 1) * group + 2 * (p - 1 - r) + 1) for r in range(p))
    elif name in ("InterleavedZeroBubble", "ZBH1"):
        assert until_inputs == tuple(min(v * m, (v - 1) * group + p - r) for r in range(p))
        assert held == (min(v * m, (v - 1) * group + p),) * p
        if name == "ZBH1":
            assert max(held) <= max(get_schedule("1F1B", p, m).peak_live())
    elif name == "ZBH2":
        assert max(held) == min(m, 2 * p - 1)
    elif name == "ZBVZeroBubble":
        assert max(held) <= 2 * p
        assert m < 2 * p or held == (2 * p,) * p
    elif name == "DualPipeV":
        assert held == ((2 * p + 1,) * p if p > 1 else held)
        assert max(held) <= 2 * p + 1
    else:
        assert held == (1,) * p


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("1F1b2", (2, 2), "no schedule is called '1F1b2'. The names are GPipe, 1F1B, .* ZBVZeroBubble / ZBV"),
        ("1F1B", (0, 2), "n_ranks=0 must be at least 1"),
        ("1F1B", (2, 0), "n_microbatches=0 must be at least 1"),
        ("1F1B", (2, 2.5), "n_microbatches=2.5 is no whole number"),
        ("1F1B", (2, 2, 2), "defined for stages_per_rank=1, not 2 .* there are LoopedBFS, Interleaved1F1B"),
        ("ZBV", (2, 2, 1), "ZBVZeroBubble is defined for stages_per_rank=2, not 1"),
        (
            "Interleaved1F1B",
            (2, 5),
            "multiple of max.*n_ranks=2, n_microbatches=5, stages_per_rank=2.*LoopedBFS",
        ),
        (
            "DualPipeV",
            (2, 3),
            "at least the number of stages, 2 \\* n_ranks; given n_ranks=2, n_microbatches=3",
        ),
        ("LoopedBFS", (2, 2, 0), "stages_per_rank=0 must be at least 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(name: str, numbers: tuple, message: str) -> None:
    n_ranks, n_microbatches, *stages = numbers
    with pytest.raises(ScheduleError, match=message):
        get_schedule(name, n_ranks, n_microbatches, stages_per_rank=stages[0] if stages else None)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("zbv", "ZBVZeroBubble"), ("ZB1P", "InterleavedZeroBubble"), ("zb-h1", "ZBH1"), ("gpipe", "GPipe")],
)
def test_aliases_and_letter_case(alias: str, name: str) -> None:
    assert get_schedule(alias, 2, 4) == get_schedule(name, 2, 4)


@pytest.mark.parametrize("name", STAGES_PER_RANK)
def test_columns_are_ticks_and_no_tick_is_wasted(name: str) -> None:
    """Inputs stand in earlier columns, and every action in the first column that allows it."""
    schedule = get_schedule(name, 3, 6)
    for row in schedule.rows:
        for step, action in enumerate(row):
            parts = () if action is None else action.parts
            inputs = [cell[1] for part in parts if (cell := schedule.cells.awaited(part)) is not None]
            assert all(tick < step for tick in inputs)
            if action is not None and step and row[step - 1] is None:
                assert step - 1 in inputs
    assert without_bubbles(schedule).rows == tuple(
        tuple(action for action in row if action is not None) for row in schedule.rows
    )


def test_lock_step_1f1b_pairs_a_forward_and_a_backward_in_each_tick_of_its_steady_state() -> None:
    assert str(get_schedule("LockStep1F1B", 2, 4)).replace("OVERLAP_F_B", "").splitlines() == [
        "rank 0 | 0F0 0F1         0F2          (0F3;0B0)         0B1          0B2 0B3",
        "rank 1 |  .  1F0 (1F1;1B0) (1F2;1B1) (1F3;1B2) 1B3  .",
    ]


def test_lock_step_1f1b_takes_1f1bs_time_where_ranks_wait_for_each_other() -> None:
    """(m + p - 1)(F + B); 1F1B itself takes longer there, from two ranks on."""
    costs = Costs(F=1.5, B=2.5)
    for p, m in itertools.product(range(1, 9), range(1, 25)):
        ideal = (m + p - 1) * 4.0
        assert simulate(get_schedule("LockStep1F1B", p, m), costs, lockstep=True).makespan == ideal
        assert simulate(get_schedule("1F1B", p, m), costs).makespan == ideal
        assert (simulate(get_schedule("1F1B", p, m), costs, lockstep=True).makespan > ideal) == (
            p > 1 and m > 1
        )
