"""Passes keep what a schedule computes and its order, and add only what they are for."""

import pytest

from jaxpar._errors import ScheduleError
from jaxpar.pp import (
    Op,
    Schedule,
    add_communication,
    add_reduce_grad,
    add_unshard,
    get_schedule,
    merge_backward,
    schedule_names,
    with_bubbles,
    without_bubbles,
)

COMPUTE = {Op.F, Op.B, Op.I, Op.W, Op.OVERLAP_F_B}
SCHEDULES = [(name, p, m) for name in schedule_names() for p, m in ((1, 2), (2, 4), (4, 8))]


def computed(schedule: Schedule) -> list[list[str]]:
    return [[str(a) for a in row if a is not None and a.op in COMPUTE] for row in schedule.rows]


@pytest.mark.parametrize(("name", "p", "m"), SCHEDULES)
def test_communication_is_all_that_crosses_ranks_and_nothing_else(name: str, p: int, m: int) -> None:
    schedule = get_schedule(name, p, m)
    lowered = add_communication(schedule)
    assert computed(lowered) == computed(schedule)
    crossings = sum(a != b for a, b in zip(schedule.rank_of_stage, schedule.rank_of_stage[1:], strict=False))
    directions = 1 if schedule.is_forward_only else 2
    num_messages = sum(op in (Op.SEND_F, Op.SEND_B) for _, op, _ in lowered.cells)
    assert num_messages == crossings * m * directions
    assert lowered.has_communication == (num_messages > 0)


def test_a_lowered_grid_is_not_lowered_again() -> None:
    with pytest.raises(ScheduleError, match="the schedule has sends and receives already"):
        add_communication(add_communication(get_schedule("GPipe", 2, 2)))


@pytest.mark.parametrize("bound", [1, 2, 3])
@pytest.mark.parametrize("name", ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV"])
def test_never_more_stages_are_whole_than_allowed(name: str, bound: int) -> None:
    schedule = add_unshard(get_schedule(name, 2, 4), max_active_stages=bound)
    for row in schedule.rows:
        whole: set[int] = set()
        for action in row:
            if action is not None and action.op == Op.UNSHARD:
                whole.add(action.stage)
            elif action is not None and action.op == Op.RESHARD:
                whole.remove(action.stage)
            assert len(whole) <= bound
        assert whole == set()


def test_looped_bfs_gathers_each_stage_twice_even_one_at_a_time() -> None:
    """The schedule for FSDP: forward once, backward once, the last stage not in between."""
    schedule = add_unshard(get_schedule("LoopedBFS", 2, 8, stages_per_rank=3), max_active_stages=1)
    gathers = [[a.stage for a in row if a is not None and a.op == Op.UNSHARD] for row in schedule.rows]
    assert gathers == [[0, 2, 4, 2, 0], [1, 3, 5, 3, 1]]


def test_unshard_gathers_ahead() -> None:
    row = add_unshard(get_schedule("LoopedBFS", 1, 1, stages_per_rank=2), max_active_stages=2).rows[0]
    assert [str(a) for a in row if a is not None][:3] == ["0UNSHARD", "1UNSHARD", "0F0"]


def test_a_bound_that_one_action_exceeds_is_refused() -> None:
    with pytest.raises(ScheduleError, match="one action of the schedule uses 2 stages at once"):
        add_unshard(get_schedule("DualPipeV", 2, 4), max_active_stages=1)
    with pytest.raises(
        ScheduleError, match="max_active_stages=0, but one action of the schedule uses 1 stage at once"
    ):
        add_unshard(get_schedule("GPipe", 2, 4), max_active_stages=0)
    with pytest.raises(ScheduleError, match="stage 0 is already unsharded"):
        add_unshard(add_unshard(get_schedule("GPipe", 2, 4)))


@pytest.mark.parametrize(("name", "p", "m"), SCHEDULES)
def test_gradients_are_reduced_once_right_after_the_last_backward(name: str, p: int, m: int) -> None:
    schedule = get_schedule(name, p, m)
    if schedule.is_forward_only:
        with pytest.raises(ScheduleError, match="there are no gradients"):
            add_reduce_grad(schedule)
        return
    reduced = add_reduce_grad(schedule)
    assert computed(reduced) == computed(schedule)
    for stage, rank in enumerate(schedule.rank_of_stage):
        row = [a for a in reduced.rows[rank] if a is not None]
        at = [step for step, a in enumerate(row) if a.op == Op.REDUCE_GRAD and a.stage == stage]
        last = max(
            step for step, a in enumerate(row) for part in a.parts
            if part.stage == stage and part.op in (Op.B, Op.W)
        )  # fmt: skip
        assert len(at) == 1 and at[0] > last
        assert all(a.op == Op.REDUCE_GRAD for a in row[last + 1 : at[0]])
    with pytest.raises(ScheduleError, match="are reduced twice"):
        add_reduce_grad(reduced)


def test_bubbles_survive_the_passes() -> None:
    """PyTorch's reduce-grad pass drops them (parity 9.5 h)."""
    schedule = Schedule([["0F0", "", "0B0"]])
    assert add_reduce_grad(add_unshard(schedule)).to_csv() == "0UNSHARD,0F0,,0B0,0REDUCE_GRAD,0RESHARD\n"


def test_merge_joins_halves_that_stand_together() -> None:
    schedule = get_schedule("ZBH1", 2, 3)
    merged = merge_backward(schedule)
    assert [" ".join(row) for row in computed(merged)] == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert merge_backward(Schedule([["0F0", "0I0", "", "0W0"]])).to_csv() == "0F0,0B0,\n"
    assert merge_backward(get_schedule("1F1B", 2, 4)) == get_schedule("1F1B", 2, 4)


@pytest.mark.parametrize(("name", "p", "m"), SCHEDULES)
def test_bubbles_come_and_go_without_changing_the_order(name: str, p: int, m: int) -> None:
    schedule = get_schedule(name, p, m)
    bare = without_bubbles(schedule)
    assert all(action is not None for row in bare.rows for action in row)
    assert with_bubbles(bare) == schedule == with_bubbles(schedule)
    lowered = add_communication(schedule)
    assert computed(with_bubbles(lowered)) == computed(schedule)
