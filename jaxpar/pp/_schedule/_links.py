"""The links between ranks: one for each pair and direction, on which messages follow each other.

posted     occupies its link for costs.on_link(stage)     arrives costs.latency later
"""

from dataclasses import dataclass

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._costs import Costs
from jaxpar.pp._schedule._timeline import Event, Message

_FORWARD, _BACKWARD = (Op.F, Op.SEND_F), (Op.B, Op.I, Op.SEND_B)


@dataclass(slots=True, eq=False)
class Step:
    """An event or a message, and the step that handed over to it last: the chain behind is the critical path."""

    item: Event | Message
    hands_over_at: float
    after: "Step | None"

    def path(self) -> tuple[Event | Message, ...]:
        """From the first step of the chain to this one."""
        found, step = [], self
        while step is not None:
            found.append(step.item)
            step = step.after
        return tuple(reversed(found))


class Links:
    """Carries messages; remembers when each link is free and what has come for whom."""

    def __init__(self, costs: Costs, rank_of_stage: tuple[int, ...]) -> None:
        self.messages: list[Message] = []
        self._came: dict[
            tuple[int, bool, int | None], Step
        ] = {}  # by stage, whether it is an activation, microbatch
        self._last: dict[tuple[int, int], Step] = {}
        self._latency = costs.latency
        self._time_on_link = [costs.on_link(stage) for stage in range(len(rank_of_stage))]
        self._route: dict[
            tuple[Op, int], tuple[int, int]
        ] = {}  # link of each op and stage that sends to another rank
        self._receives: set[tuple[Op, int]] = set()
        for stage in range(len(rank_of_stage) - 1):
            here, there = rank_of_stage[stage], rank_of_stage[stage + 1]
            if here != there:
                self._route |= {(op, stage): (here, there) for op in _FORWARD}
                self._route |= {(op, stage + 1): (there, here) for op in _BACKWARD}
                self._receives |= {(Op.F, stage + 1), (Op.B, stage), (Op.I, stage)}

    def come_for(self, part: Action) -> Step | None:
        """The message that `part` uses; None if its input is of its own rank."""
        if (part.op, part.stage) not in self._receives:
            return None
        return self._came[part.stage, part.op == Op.F, part.microbatch]

    def post(self, part: Action, at: float, after: Step | None) -> Step | None:
        """Send what `part`, a computation or a SEND, hands to another rank; None if it hands over nothing."""
        link = self._route.get((part.op, part.stage))
        if link is None:
            return None
        earlier = self._last.get(link)
        if earlier is not None and earlier.item.end > at:
            at, after = earlier.item.end, earlier
        end = at + self._time_on_link[part.stage]
        message = Message(*link, part, at, end, end + self._latency)
        self.messages.append(message)
        is_forward = part.op in _FORWARD
        step = Step(message, message.arrival, after)
        self._came[part.stage + (1 if is_forward else -1), is_forward, part.microbatch] = self._last[link] = (
            step
        )
        return step
