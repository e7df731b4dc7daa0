"""The links between ranks: one for each pair and direction, on which messages follow each other.

posted     occupies its link for costs.on_link(stage)     arrives costs.latency later
"""

from dataclasses import dataclass, field

from jaxpar.pp._schedule._action import BACKWARD, Action, Op
from jaxpar.pp._schedule._costs import Costs
from jaxpar.pp._schedule._timeline import Event, Message

Inbox = tuple[int, bool, int | None]  # stage that waits, whether for an activation, microbatch


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """An event or a message, and the step that handed over to it last: the chain behind is the critical path."""

    item: Event | Message
    after: "Step | None"

    def path(self) -> tuple[Event | Message, ...]:
        """From the first step of the chain to this one."""
        found, step = [], self
        while step is not None:
            found.append(step.item)
            step = step.after
        return tuple(reversed(found))


@dataclass
class Links:
    """Carries messages; remembers when each link is free and what has come for whom."""

    costs: Costs
    rank_of_stage: tuple[int, ...]
    messages: list[Message] = field(default_factory=list)
    inbox: dict[Inbox, Step] = field(default_factory=dict)
    last: dict[tuple[int, int], Step] = field(default_factory=dict)

    def post(self, part: Action, at: float, after: Step | None) -> Step | None:
        """Send what `part`, a computation or a SEND, hands to another rank; None if it hands over nothing."""
        is_forward = part.op in (Op.F, Op.SEND_F)
        if not is_forward and part.op not in BACKWARD and part.op != Op.SEND_B:
            return None
        receiver = part.stage + (1 if is_forward else -1)
        if not 0 <= receiver < len(self.rank_of_stage):
            return None
        link = source, target = self.rank_of_stage[part.stage], self.rank_of_stage[receiver]
        if source == target:
            return None
        earlier = self.last.get(link)
        if earlier is not None and earlier.item.end > at:
            at, after = earlier.item.end, earlier
        end = at + self.costs.on_link(part.stage)
        message = Message(source, target, part, at, end, end + self.costs.latency)
        self.messages.append(message)
        step = self.last[link] = self.inbox[receiver, is_forward, part.microbatch] = Step(message, after)
        return step

    def come_for(self, part: Action) -> Step | None:
        """The message that `part` uses; None if its input is of its own rank."""
        return self.inbox.get((part.stage, part.op is Op.F, part.microbatch)) if part.op is not Op.W else None
