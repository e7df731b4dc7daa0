"""A schedule that breaks a law cannot be made; the message names the law, marks the cell, and says how to mend it."""

import io
import re

import pytest

from jaxpar._errors import ScheduleError
from jaxpar.pp import Action, Schedule, get_schedule


def rows(*lines: str) -> list[list[str]]:
    return [["" if cell == "." else cell for cell in line.split()] for line in lines]


BROKEN = {
    "wrong row": (["0F0 0B0 1F0", "1B0"], "ownership", "1B0 runs on rank 1, but stage 1 is held by rank 0"),
    "twice": (["0F0 0F0 0B0"], "completeness", "0F0 was already at step 0"),
    "no forward": (["0F0 0B0 0B1"], "completeness", "0F1 is missing in row 0"),
    "no backward": (["0F0 0F1 0B0"], "completeness", "0B1 is missing in row 0"),
    "no W": (["0F0 0I0"], "completeness", "0W0 is missing in row 0"),
    "no I": (["0F0 0W0"], "completeness", "0I0 is missing in row 0"),
    "B and I": (["0F0 0B0 0I0"], "completeness", "0I0 computes again what 0B0 computes"),
    "B and W": (["0F0 0B0 0W0"], "completeness", "0W0 computes again what 0B0 computes"),
    "a stage goes only forward": (["0F0 0B0", "1F0"], "completeness", "1B0 is missing in row 1"),
    "a hole": (["0F0 0B0", "2F0 2B0"], "completeness", "no rank computes stage 1"),
    "empty": ([".", "."], "completeness", "no rank computes stage 0"),
    "backward first": (["0B0 0F0"], "order", "0B0 runs before 0F0 (step 1)"),
    "W first": (["0F0 0W0 0I0"], "order", "0W0 runs before 0I0 (step 2)"),
    "next stage first, same rank": (["1F0 0F0 1B0 0B0"], "order", "1F0 runs before 0F0 (step 1)"),
    "gradient first, same rank": (["0F0 1F0 0B0 1B0"], "order", "0B0 runs before 1B0 (step 3)"),
    "a pair that feeds itself": (["0F0 1F0 1B0 (0F1;0B1)OVERLAP_F_B 1F1 1B1 0B0"], "order", "0B1 runs before 0F1"),
    "receive after use": (["0F0 0SEND_F0", "1F0 1RECV_F0"], "order", "1F0 runs before 1RECV_F0 (step 1)"),
    "send before made": (["0SEND_F0 0F0", "1RECV_F0 1F0"], "order", "0SEND_F0 runs before 0F0 (step 1)"),
    "gradient received after use": (
        ["0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0"], "order", "0B0 runs before 0RECV_B0 (step 3)",
    ),
    "gradient sent before made": (
        ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1SEND_B0 1B0"], "order", "1SEND_B0 runs before 1B0 (step 3)",
    ),
    "use while sharded": (["0F0 0UNSHARD 0B0"], "order", "0F0 runs while stage 0 is sharded"),
    "unshard twice": (["0UNSHARD 0UNSHARD 0F0 0B0"], "order", "stage 0 is already unsharded"),
    "reshard of a shard": (["0F0 0B0 0RESHARD"], "order", "stage 0 is not unsharded"),
    "reduce early": (["0F0 0REDUCE_GRAD 0B0"], "order", "runs before the stage's last backward (step 2)"),
    "reduce twice": (["0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD"], "order", "the gradients of stage 0 are reduced twice"),
    "no receive": (["0F0 0SEND_F0", "1F0"], "matching", "row 1 has no 1RECV_F0"),
    "no send": (["0F0", "1RECV_F0 1F0"], "matching", "row 0 has no 0SEND_F0"),
    "gradient stays behind": (
        ["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"], "matching", "row 1 has no 1SEND_B0",
    ),
    "a message within a rank": (["0F0 0SEND_F0 1RECV_F0 1F0"], "matching", "no computation on another rank makes or"),
    "a message out of the pipeline": (
        ["0RECV_F0 0F0 0SEND_F0", "1RECV_F0 1F0"], "matching", "no computation on another rank makes or uses",
    ),
    "each behind the other": (
        ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], "progress",
        "deadlock: rank 0 at step 1 (0B0) waits for 1B0 of rank 1; rank 1 at step 0 (1F1) waits for 0F1 of rank 0",
    ),
    "one channel, two orders": (
        ["0F0 0F1 0SEND_F1 0SEND_F0", "1RECV_F0 1F0 1RECV_F1 1F1"], "progress",
        "rank 0 has 0SEND_F1 (step 2) where rank 1 has 1RECV_F0 (step 0)",
    ),
    "send against send": (
        ["0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"],
        "progress", "rank 0 has 0SEND_F1 (step 3) where rank 1 has 1SEND_B0 (step 3)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_law_is_named(name: str) -> None:
    lines, law, what = BROKEN[name]
    with pytest.raises(ScheduleError, match=re.escape(what)) as error:
        Schedule(rows(*lines))
    assert error.value.law == law
    assert f"law '{law}'" in str(error.value)


def test_message_prints_the_grid_with_the_cell_marked() -> None:
    with pytest.raises(ScheduleError) as error:
        Schedule(rows("0F0 0F1 . 0B0 0B1", ". 1B0 1F0 1F1 1B1"))
    assert str(error.value) == (
        "law 'order' broken at rank 1, step 1: 1B0 runs before 1F0 (step 2).\n"
        "    rank 0 | 0F0 0F1  .  0B0 0B1\n"
        "    rank 1 |  .  1B0 1F0 1F1 1B1\n"
        "                 ^^^\n"
        "A backward needs its own forward on the same stage first. Swap the two cells."
    )


def test_message_of_a_large_grid_shows_the_cells_around() -> None:
    schedule = get_schedule("GPipe", 16, 64)
    lines = [list(row) for row in schedule.rows]
    lines[9][30], lines[9][31] = lines[9][31], lines[9][30]
    lines[9][40] = lines[9][41]
    with pytest.raises(ScheduleError, match="9F32 was already at step 40") as error:
        Schedule(lines)
    picture = [line for line in str(error.value).splitlines() if line.startswith("    ")]
    assert picture[0] == "    (from step 35)"
    assert len(picture) == 1 + 9 + 1 and max(map(len, picture)) < 100


@pytest.mark.parametrize(
    ("rank_of_stage", "what"),
    [
        ((0, 2), "rank_of_stage gives stage 1 to rank 2, but there are 2 rows, ranks 0 to 1"),
        ((0,), "1F0 names stage 1, but rank_of_stage has 1 stages"),
        ((1, 0), "0F0 runs on rank 0, but stage 0 is held by rank 1"),
    ],
)
def test_rank_of_stage_must_fit_the_rows(rank_of_stage: tuple[int, ...], what: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(what)) as error:
        Schedule(rows("0F0 0B0", "1F0 1B0"), rank_of_stage)
    assert error.value.law == "ownership"


def test_a_stage_of_the_table_that_computes_nothing_is_incomplete() -> None:
    with pytest.raises(ScheduleError, match="1F0 is missing in row 1") as error:
        Schedule(rows("0F0 0B0", "."), (0, 1))
    assert error.value.law == "completeness"
    with pytest.raises(ScheduleError, match="the schedule computes nothing"):
        Schedule(rows("0UNSHARD 0RESHARD"), (0,))


def test_memory_is_a_law_if_a_limit_is_given() -> None:
    lines = rows("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert Schedule(lines, memory_limit=2).memory_limit == 2
    assert Schedule(lines, memory_limit=[2, 1]).memory_limit == (2, 1)
    with pytest.raises(ScheduleError, match="rank 0 holds 2 activations at once, memory_limit is 1") as error:
        Schedule(lines, memory_limit=1)
    assert error.value.law == "memory"
    assert "at rank 0, step 1" in str(error.value)
    with pytest.raises(ScheduleError, match="memory_limit has 3 entries for 2 ranks"):
        Schedule(lines, memory_limit=(1, 2, 3))


def test_a_cell_is_an_action_its_text_or_a_bubble() -> None:
    assert Schedule([[Action.parse("0F0"), None, "0B0", ""]]).rows[0][1] is None
    with pytest.raises(ScheduleError, match="a cell is 3 of type int"):
        Schedule([["0F0", 3]])  # type: ignore


def test_csv_names_the_cell_that_it_cannot_read() -> None:
    with pytest.raises(ScheduleError, match="line 2, cell 1: law 'grammar' broken: '1F0x' is not an action"):
        Schedule.from_csv(io.StringIO("0F0,0B0\n1F0x,1B0\n"))


def test_a_schedule_is_a_value() -> None:
    one, two = Schedule([["0F0", "0B0"]]), Schedule([["0F0", "0B0"]])
    assert one == two and hash(one) == hash(two) and len({one, two}) == 1
    assert one != Schedule([["0F0", "", "0B0"]])
    with pytest.raises(AttributeError):
        one.rows = ()  # type: ignore


def test_facts_of_a_schedule() -> None:
    schedule = get_schedule("ZBV", 2, 4)
    assert (schedule.n_ranks, schedule.n_stages, schedule.n_microbatches) == (2, 4, 4)
    assert schedule.rank_of_stage == (0, 1, 1, 0)
    assert schedule.stages_of_rank(0) == (0, 3)
    assert not schedule.is_forward_only and not schedule.has_communication
    assert get_schedule("ForwardOnly", 2, 4).is_forward_only
    assert len(schedule.cells) == sum(action is not None for row in schedule.rows for action in row)
    assert all(str(schedule.rows[r][t]) == f"{s}{op}{m}" for (s, op, m), (r, t) in schedule.cells.items())
    with pytest.raises(KeyError):
        schedule.cells[9, "F", 0]  # type: ignore
