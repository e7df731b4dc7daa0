"""What each action of a schedule takes, in time and memory: the numbers that the simulator and the search use."""

import dataclasses
import math
from dataclasses import dataclass

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._action import Action, Op

PerStage = float | tuple[float, ...]

_PER_STAGE = ("F", "I", "W", "B", "OVERLAP_F_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "message_bytes")
_MEMORY = ("activation", "kept_for_W")


@dataclass(frozen=True)
class Costs:
    """Durations of one microbatch on one stage, and what its activations weigh.

    Numbers are in any unit as long as all share it; measured ones are seconds and bytes. One number serves every
    stage, a tuple gives each stage its own.

    Args:
        F: Forward.
        I: Backward for inputs.
        W: Backward for weights.
        B: Full backward; None means I + W.
        OVERLAP_F_B: A forward and a backward that run together, by the forward's stage; None means one after the
            other.
        UNSHARD: Gather a stage's parameters.
        RESHARD: Free them.
        REDUCE_GRAD: Reduce a stage's gradients.
        latency: From the end of a send to its arrival.
        bandwidth: Of the link between two ranks, each direction, per unit of time; messages on a link follow each
            other.
        message_bytes: What a stage hands to a neighbour, forward or backward.
        activation: Memory of one activation (one stage, one microbatch) from the start of F to the end of B or I.
        kept_for_W: The part of it that stays until the end of W.

    Raises:
        ScheduleError: Law definition: a number is negative or not finite, the bandwidth is 0, or kept_for_W is more
            than activation.

    Example:
        >>> Costs(F=1, I=1, W=1).of(Action.parse("0B3"))
        2
    """

    F: PerStage = 1.0
    I: PerStage = 1.0
    W: PerStage = 1.0
    B: PerStage | None = None
    OVERLAP_F_B: PerStage | None = None
    UNSHARD: PerStage = 0.0
    RESHARD: PerStage = 0.0
    REDUCE_GRAD: PerStage = 0.0
    latency: float = 0.0
    bandwidth: float = math.inf
    message_bytes: PerStage = 0.0
    activation: PerStage = 1.0
    kept_for_W: PerStage | None = None

    def __post_init__(self) -> None:
        for name in (*_PER_STAGE, *_MEMORY, "latency"):
            given = getattr(self, name)
            for number in given if isinstance(given, tuple) else (given,):
                if number is not None and not 0 <= number < math.inf:
                    raise _wrong(f"{name}={given!r}: durations, bytes and memory are finite and at least 0")
        if not self.bandwidth > 0:
            raise _wrong(f"bandwidth={self.bandwidth!r}: give bytes per unit of time, more than 0")
        kept, all_of_it = self.kept_for_W, self.activation
        stages = max((len(x) for x in (kept, all_of_it) if isinstance(x, tuple)), default=1)
        if kept is not None and any(_at(kept, s) > _at(all_of_it, s) for s in range(stages)):
            raise _wrong(f"kept_for_W={kept!r} is more than activation={all_of_it!r}, of which it is a part")

    @classmethod
    def parse(cls, text: str) -> "Costs":
        """Costs written as `"F=1,I=1,W=1"`; names are those of the constructor, one number for all stages.

        Args:
            text: Comma-separated name=number.

        Raises:
            ScheduleError: An unknown name, or something that is no number.

        Example:
            >>> Costs.parse("F=2,latency=0.5").latency
            0.5
        """
        found: dict[str, float] = {}
        names = [field.name for field in dataclasses.fields(cls)]
        for item in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, number = item.partition("=")
            if name not in names:
                raise _wrong(f"{item!r} in {text!r}: the names are {', '.join(names)}")
            try:
                found[name] = float(number)
            except ValueError:
                raise _wrong(f"{item!r} in {text!r}: {number!r} is no number") from None
        return cls(**found)

    def of(self, action: Action) -> float:
        """How long `action` keeps its rank busy; sends and receives take the link's time, not the rank's.

        Args:
            action: Any action.

        Example:
            >>> Costs(F=(1.0, 3.0)).of(Action.parse("(1F0;0B0)OVERLAP_F_B"))
            5.0
        """
        if action.op == Op.OVERLAP_F_B and self.OVERLAP_F_B is None:
            return sum(self.of(part) for part in action.sub_actions)
        if action.op == Op.B and self.B is None:
            return _at(self.I, action.stage) + _at(self.W, action.stage)
        return _at(getattr(self, action.op.name, 0.0), action.stage)

    def on_link(self, stage: int) -> float:
        """How long a message out of `stage` occupies its link.

        Args:
            stage: The stage that sends.

        Example:
            >>> Costs(message_bytes=8, bandwidth=2).on_link(0)
            4.0
        """
        return _at(self.message_bytes, stage) / self.bandwidth

    def memory(self, stage: int) -> tuple[float, float]:
        """What one activation of `stage` weighs from F to B or I, and from I to W.

        Args:
            stage: The stage that holds it.

        Example:
            >>> Costs(activation=4, kept_for_W=1).memory(0)
            (4, 1)
        """
        whole = _at(self.activation, stage)
        return whole, whole if self.kept_for_W is None else _at(self.kept_for_W, stage)

    def check_stages(self, n_stages: int) -> None:
        """Raise unless every tuple has one number for each stage.

        Args:
            n_stages: Stages of the pipeline.

        Raises:
            ScheduleError: Law definition: a tuple of another length.

        Example:
            >>> Costs(F=(1.0, 2.0)).check_stages(2)
        """
        for name in (*_PER_STAGE, *_MEMORY):
            given = getattr(self, name)
            if isinstance(given, tuple) and len(given) != n_stages:
                raise _wrong(
                    f"{name} has {len(given)} numbers, but the schedule has {n_stages} stages: "
                    "give one number, or one for each stage"
                )


def _at(given: PerStage, stage: int) -> float:
    return given[stage] if isinstance(given, tuple) else given


def _wrong(why: str) -> ScheduleError:
    return ScheduleError(f"costs: {why}.", law="definition")
