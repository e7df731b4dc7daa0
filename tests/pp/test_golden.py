"""W7: named schedules and passes, row for row as PyTorch makes them; its tables lie in golden/."""

import io
import re
from pathlib import Path

import pytest

from jaxpar.pp import Action, Op, Schedule, add_communication, add_reduce_grad, add_unshard, get_schedule

GOLDEN = Path(__file__).parent / "golden"
LOWERED = sorted(GOLDEN.glob("*_lowered.csv"))
COMPUTE = sorted(set(GOLDEN.glob("*.csv")) - set(LOWERED))


def built(path: Path) -> Schedule:
    """Our schedule for the numbers in a file's name."""
    name, *numbers = re.fullmatch(r"(\w+?)_p(\d+)_v(\d+)_m(\d+)(?:_lowered)?", path.stem).groups()  # type: ignore
    n_ranks, stages_per_rank, n_microbatches = map(int, numbers)
    return get_schedule(name, n_ranks, n_microbatches, stages_per_rank=stages_per_rank)


def actions(schedule: Schedule, *, without: tuple[Op, ...] = ()) -> list[list[Action]]:
    return [[a for a in row if a is not None and a.op not in without] for row in schedule.rows]


def test_there_are_tables() -> None:
    assert (len(COMPUTE), len(LOWERED)) == (70, 7)


@pytest.mark.parametrize("path", COMPUTE, ids=lambda path: path.stem)
def test_named_schedule_has_pytorchs_order(path: Path) -> None:
    theirs, ours = Schedule.from_csv(path), built(path)
    assert actions(ours) == actions(theirs, without=(Op.REDUCE_GRAD,))
    assert ours.rank_of_stage == theirs.rank_of_stage


@pytest.mark.parametrize("path", LOWERED, ids=lambda path: path.stem)
def test_passes_lower_as_pytorchs_do(path: Path) -> None:
    ours = add_communication(add_reduce_grad(add_unshard(built(path))))
    assert ours.to_csv() == path.read_text()


@pytest.mark.parametrize("path", [*COMPUTE, *LOWERED], ids=lambda path: path.stem)
def test_csv_round_trip_keeps_every_cell(path: Path) -> None:
    text = path.read_bytes().decode().replace("\r\n", "\n")
    schedule = Schedule.from_csv(path)
    assert schedule.to_csv() == text
    assert Schedule.from_csv(io.StringIO(text)) == schedule


def test_lowered_row_of_the_parity_table() -> None:
    schedule = add_communication(add_reduce_grad(add_unshard(get_schedule("Interleaved1F1B", 2, 2))))
    assert " ".join(map(str, schedule.rows[0])) == (
        "0UNSHARD 2UNSHARD 0F0 0SEND_F0 2RECV_F0 0F1 0SEND_F1 2RECV_F1 2F0 2SEND_F0 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 "
        "2RECV_B1 2B1 2SEND_B1 2REDUCE_GRAD 2RESHARD 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0RESHARD"
    )


def test_1f1b_has_the_order_of_pytorchs_runtime() -> None:
    """Its table, the one that the visualiser shows, has F1..Fm on the last rank; the law refuses it (parity 9.5 a)."""
    schedule = get_schedule("1F1B", 2, 3)
    assert [" ".join(map(str, row)) for row in actions(schedule)] == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]
    with pytest.raises(
        ValueError, match="law 'completeness' broken at rank 0, step 6: 0F3 is missing in row 0"
    ):
        Schedule([["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"], ["1F1", "1B0", "1F2", "1B1", "1F3", "1B2"]])
