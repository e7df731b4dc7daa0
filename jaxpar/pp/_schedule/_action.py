"""One cell of a schedule: what a rank does for one stage and one microbatch, written as PyTorch writes it.

2F0                        forward of microbatch 0 on stage 2
2B0                        full backward             2I0, 2W0   its two halves: for inputs, for weights
2SEND_F0  2RECV_F0         activation out of, into stage 2      2SEND_B0, 2RECV_B0   gradient, the same way
2UNSHARD  2RESHARD         gather, free the stage's parameters  2REDUCE_GRAD         reduce its gradients
(0F3;3B1)OVERLAP_F_B       a forward and a backward that run together
"""

import enum
import functools
import re
from dataclasses import dataclass

from jaxpar._errors import ScheduleError


class Op(enum.StrEnum):
    """What an action does; a member equals its PyTorch token.

    >>> Op.SEND_F == "SEND_F"
    True
    """

    F = "F"
    B = "B"
    I = "I"
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"


BACKWARD = frozenset({Op.B, Op.I})  # what hands a gradient to the stage before
COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
COMMUNICATION = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})
OF_A_STAGE = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})  # these name no microbatch

_TOKEN = re.compile(r"(\d+)([A-Z_]+?)(\d+)?")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does; source: PyTorch's `_Action` (parity 9.2).

    Args:
        stage: The stage, counted from 0 at the input; of an overlapped pair, its forward's.
        op: An `Op` or its token.
        microbatch: The microbatch, counted from 0; None for `UNSHARD`, `RESHARD` and `REDUCE_GRAD`.
        sub_actions: Of `OVERLAP_F_B` only: the forward and the backward that run together.

    Raises:
        ScheduleError: Law grammar: a negative number, a microbatch too many or missing, a pair that is none.

    Example:
        >>> Action(2, Op.F, 0) == Action.parse("2F0")
        True
        >>> print(Action.overlap(Action.parse("0F3"), Action.parse("3B1")))
        (0F3;3B1)OVERLAP_F_B
    """

    stage: int
    op: Op
    microbatch: int | None = None
    sub_actions: "tuple[Action, ...]" = ()

    def __post_init__(self) -> None:
        if type(self.op) is not Op:
            object.__setattr__(self, "op", _op(self.op))
        is_plain = not self.sub_actions and self.op != Op.OVERLAP_F_B
        if is_plain and self.stage >= 0 and (self.microbatch is None) == (self.op in OF_A_STAGE):
            if self.microbatch is None or self.microbatch >= 0:
                return
        if self.stage < 0 or (self.microbatch is not None and self.microbatch < 0):
            raise _wrong(repr(self), "stages and microbatches are counted from 0")
        if (self.microbatch is None) != (self.op in OF_A_STAGE):
            raise _wrong(repr(self), f"{self.op} names {'no' if self.op in OF_A_STAGE else 'a'} microbatch")
        if (self.op == Op.OVERLAP_F_B) != bool(self.sub_actions):
            raise _wrong(repr(self), "OVERLAP_F_B and nothing else has sub-actions; use Action.overlap")
        if self.sub_actions and [part.op == Op.F for part in self.sub_actions] != [True, False]:
            raise _wrong(repr(self), "an overlapped pair is a forward and a backward, in this order")
        if self.sub_actions and self.sub_actions[1].op not in BACKWARD:
            raise _wrong(repr(self), "the second of an overlapped pair is B or I")

    @classmethod
    def overlap(cls, forward: "Action", backward: "Action") -> "Action":
        """The pair that runs together on one rank.

        Args:
            forward: An `F`.
            backward: A `B` or an `I`.

        Raises:
            ScheduleError: Law grammar: the two are not such a pair.

        Example:
            >>> Action.overlap(Action(0, Op.F, 3), Action(3, Op.B, 1)).stage
            0
        """
        return cls(forward.stage, Op.OVERLAP_F_B, forward.microbatch, (forward, backward))

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that PyTorch writes so; nothing may follow it.

        Args:
            text: For instance `"2F0"`, `"3SEND_F1"`, `"1UNSHARD"`, `"(0F3;3B1)OVERLAP_F_B"`.

        Raises:
            ScheduleError: Law grammar: this is no token, or something follows it.

        Example:
            >>> Action.parse("3SEND_F1")
            Action(stage=3, op=<Op.SEND_F: 'SEND_F'>, microbatch=1, sub_actions=())
        """
        return _parse(text)

    @property
    def parts(self) -> "tuple[Action, ...]":
        """The two actions of an overlapped pair, or the action itself.

        >>> [str(part) for part in Action.parse("(0F3;3B1)OVERLAP_F_B").parts]
        ['0F3', '3B1']
        """
        return self.sub_actions or (self,)

    def __str__(self) -> str:
        if self.sub_actions:
            return f"({';'.join(map(str, self.sub_actions))})OVERLAP_F_B"
        return f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"


@functools.lru_cache(maxsize=1 << 16)
def _parse(text: str) -> Action:
    if pair := _PAIR.fullmatch(text):
        return Action.overlap(*(_parse(part) for part in pair.groups()))
    if not (token := _TOKEN.fullmatch(text)):
        raise _wrong(repr(text), "an action is <stage><op><microbatch>, and nothing follows it")
    stage, op, microbatch = token.groups()
    return Action(int(stage), _op(op), None if microbatch is None else int(microbatch))


def _op(text: str) -> Op:
    try:
        return Op(text)
    except ValueError:
        raise _wrong(repr(text), f"the ops are {', '.join(Op)}") from None


def _wrong(what: str, why: str) -> ScheduleError:
    return ScheduleError(
        f"law 'grammar' broken: {what} is not an action: {why}. "
        "Write for instance 2F0, 2SEND_F0, 2UNSHARD or (0F3;3B1)OVERLAP_F_B.",
        law="grammar",
    )
