"""The links between ranks: one for each pair and direction, on which messages follow each other.

posted     occupies its link for costs.on_link(stage)     arrives costs.latency later
"""

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._costs import Costs
from jaxpar.pp._schedule._timeline import Event, Message

START = -1  # the step before the first

_FORWARD, _BACKWARD = (Op.F, Op.SEND_F), (Op.B, Op.I, Op.SEND_B)


class Chain:
    """All events and messages, each with the one that handed over to it last: behind the last, the critical path.

    A step is a number: hundreds of thousands of linked objects would keep the garbage collector busy.
    """

    def __init__(self) -> None:
        self.items: list[Event | Message] = []
        self.hands_over_at: list[float] = []
        self._after: list[int] = []

    def add(self, item: Event | Message, hands_over_at: float, after: int) -> int:
        """The number of a step that starts when step `after` hands over; START if nothing is before it."""
        self.items.append(item)
        self.hands_over_at.append(hands_over_at)
        self._after.append(after)
        return len(self.items) - 1

    def path(self, step: int) -> tuple[Event | Message, ...]:
        """From the first step to this one."""
        found = []
        while step != START:
            found.append(self.items[step])
            step = self._after[step]
        return tuple(reversed(found))


class Links:
    """Carries messages; remembers when each link is free and what has come for whom."""

    def __init__(self, costs: Costs, rank_of_stage: tuple[int, ...], chain: Chain) -> None:
        self.messages: list[Message] = []
        self._chain = chain
        self._came: dict[
            tuple[int, bool, int | None], int
        ] = {}  # by stage, whether it is an activation, microbatch
        self._last: dict[
            tuple[int, int], tuple[int, float]
        ] = {}  # of each link: last message, when it is free
        self._latency = costs.latency
        self._time_on_link = [costs.on_link(stage) for stage in range(len(rank_of_stage))]
        self._route: dict[tuple[Op, int], tuple[int, int]] = {}  # link of each op and stage that sends
        self._receives: set[tuple[Op, int]] = set()
        for stage in range(len(rank_of_stage) - 1):
            here, there = rank_of_stage[stage], rank_of_stage[stage + 1]
            if here != there:
                self._route |= {(op, stage): (here, there) for op in _FORWARD}
                self._route |= {(op, stage + 1): (there, here) for op in _BACKWARD}
                self._receives |= {(Op.F, stage + 1), (Op.B, stage), (Op.I, stage)}

    def come_for(self, part: Action) -> int | None:
        """The step of the message that `part`, its only user, uses; None if its input is of its own rank."""
        if (part.op, part.stage) not in self._receives:
            return None
        return self._came.pop((part.stage, part.op == Op.F, part.microbatch))

    def post(self, part: Action, at: float, after: int) -> int | None:
        """Send what `part`, a computation or a SEND, hands to another rank; None if it hands over nothing."""
        link = self._route.get((part.op, part.stage))
        if link is None:
            return None
        earlier, free_at = self._last.get(link, (START, 0.0))
        if free_at > at:
            at, after = free_at, earlier
        end = at + self._time_on_link[part.stage]
        message = Message(*link, part, at, end, end + self._latency)
        self.messages.append(message)
        step = self._chain.add(message, message.arrival, after)
        self._last[link] = step, end
        is_forward = part.op in _FORWARD
        self._came[part.stage + (1 if is_forward else -1), is_forward, part.microbatch] = step
        return step
