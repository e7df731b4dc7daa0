"""W7: an action is read as PyTorch writes it, and nothing else is read."""

import pytest

from jaxpar._errors import ScheduleError
from jaxpar.pp import Action, Op

TOKENS = [
    "2F0", "2B0", "2I0", "2W0", "3SEND_F1", "3RECV_F1", "3SEND_B12", "12RECV_B1",
    "1UNSHARD", "1RESHARD", "1REDUCE_GRAD", "(0F3;3B1)OVERLAP_F_B", "(0F3;3I1)OVERLAP_F_B",
]  # fmt: skip


@pytest.mark.parametrize("text", TOKENS)
def test_token_round_trips(text: str) -> None:
    assert str(Action.parse(text)) == text
    assert hash(Action.parse(text)) == hash(Action.parse(text))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("2F0garbage", "nothing follows it"),
        ("", "nothing follows it"),
        ("F0", "nothing follows it"),
        (" 2F0", "nothing follows it"),
        ("2F0 ", "nothing follows it"),
        ("2f0", "nothing follows it"),
        ("-1F0", "nothing follows it"),
        ("2X0", "the ops are F, B, I, W, SEND_F"),
        ("2F", "F names a microbatch"),
        ("2UNSHARD0", "UNSHARD names no microbatch"),
        ("2OVERLAP_F_B0", "use Action.overlap"),
        ("(0F3)OVERLAP_F_B", "nothing follows it"),
        ("(0B3;3F1)OVERLAP_F_B", "a forward and a backward, in this order"),
        ("(0F3;3W1)OVERLAP_F_B", "the second of an overlapped pair is B or I"),
        ("(0F3;3B1)OVERLAP_F_B2", "nothing follows it"),
        ("(0F3;(0F1;1B1)OVERLAP_F_B)OVERLAP_F_B", "nothing follows it"),
    ],
)
def test_what_is_no_token_is_refused(text: str, why: str) -> None:
    with pytest.raises(ScheduleError, match="law 'grammar' broken") as error:
        Action.parse(text)
    assert why in str(error.value)
    assert error.value.law == "grammar"


def test_an_action_checks_itself_when_made_by_hand() -> None:
    assert Action(1, "F", 2).op is Op.F  # type: ignore
    with pytest.raises(ScheduleError, match="stages and microbatches are counted from 0"):
        Action(-1, Op.F, 0)
    with pytest.raises(ScheduleError, match="stages and microbatches are counted from 0"):
        Action(1, Op.F, -1)
    with pytest.raises(ScheduleError, match="use Action.overlap"):
        Action(1, Op.F, 1, (Action(1, Op.F, 1), Action(1, Op.B, 0)))


def test_parts_of_a_pair() -> None:
    pair = Action.parse("(0F3;3B1)OVERLAP_F_B")
    assert (pair.stage, pair.microbatch) == (0, 3)
    assert [str(part) for part in pair.parts] == ["0F3", "3B1"]
    assert Action.parse("0F3").parts == (Action.parse("0F3"),)
