"""A schedule with a clock: when every action ran, when every message travelled, what that cost.

    rank 0 |0F0|.................|0B0....|     Event(rank=0, action=0F0, start=0, end=1)
               '>               '<            Message(source=0, target=1, action=0F0, start=1, end=2, arrival=2)
    rank 1 |.....|1F0|1B0....|...........|     idle = makespan - busy

Events and messages are named tuples: there are hundreds of thousands, and they are made twice as fast.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxpar.pp._schedule._action import BACKWARD, Action, Op
from jaxpar.pp._schedule._costs import Costs
from jaxpar.pp._schedule._schedule import Schedule


class Event(NamedTuple):
    """One action on the clock; an overlapped pair is one event.

    Args:
        rank: Who runs it.
        action: What runs.
        start: When it starts, in the unit of the costs.
        end: When it ends.

    Example:
        >>> Event(0, Action.parse("0F0"), 0.0, 1.5).duration
        1.5
    """

    rank: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        """How long it keeps its rank busy."""
        return self.end - self.start


class Message(NamedTuple):
    """One activation or gradient on its way from a rank to another.

    Args:
        source: The rank that sends.
        target: The rank that receives.
        action: What made it, or its SEND where the grid spells messages out.
        start: When it enters the link, which earlier messages may have kept busy.
        end: When it has left the link, so that the next may enter.
        arrival: When the receiver can use it: the latency later.

    Example:
        >>> Message(0, 1, Action.parse("0F0"), 1.0, 2.0, 2.5).arrival
        2.5
    """

    source: int
    target: int
    action: Action
    start: float
    end: float
    arrival: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """What `simulate` found; all times in the unit of the costs. Printed, it is a table of the ranks.

    Args:
        schedule: What was simulated.
        costs: With which durations.
        events: For each rank what it did, in order; sends and receives take no time of a rank and are messages.
        messages: What travelled between ranks, in the order in which it was posted.
        critical_path: Events and messages from 0 to the makespan, each starting when the one before it handed over:
            to end sooner, something on it must become shorter.

    Example:
        >>> from jaxpar.pp import Schedule, simulate
        >>> print(simulate(Schedule([["0F0", "0B0"], ["1F0", "1B0"]])))
        makespan 6, 50.0 % idle
        rank  busy  idle  bubble  peak memory
           0     3     3   50.0%            1
           1     3     3   50.0%            1
    """

    schedule: Schedule
    costs: Costs
    events: tuple[tuple[Event, ...], ...]
    messages: tuple[Message, ...]
    critical_path: tuple[Event | Message, ...]

    @functools.cached_property
    def makespan(self) -> float:
        """When the last action ends, or the last message of a tick loop's last tick arrives.

        >>> from jaxpar.pp import Schedule, simulate
        >>> simulate(Schedule([["0F0", "0B0"]])).makespan
        3.0
        """
        last = self.critical_path[-1]
        return last.end if isinstance(last, Event) else last.arrival

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank the time in which it runs something."""
        return tuple(sum(event.end - event.start for event in row) for row in self.events)

    @property
    def idle(self) -> tuple[float, ...]:
        """For each rank the rest of the makespan: its bubble."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_fraction(self) -> tuple[float, ...]:
        """For each rank idle / makespan; 0 if nothing takes any time."""
        return tuple(idle / self.makespan if self.makespan else 0.0 for idle in self.idle)

    def live(self, rank: int) -> tuple[tuple[float, float], ...]:
        """Memory of activations that a rank holds: a step function, as (from this time on, this much).

        An activation is held from the start of its F to the end of its B or I, `kept_for_W` of it from there to the
        end of its W. Where nothing goes backward it is freed when its F ends.

        Args:
            rank: A rank.

        Example:
            >>> from jaxpar.pp import Schedule, simulate
            >>> simulate(Schedule([["0F0", "0F1", "0B0", "0B1"]])).live(0)
            ((0.0, 1.0), (1.0, 2.0), (4.0, 1.0), (6.0, 0.0))
        """
        return tuple(dict(self._held(rank)).items())

    @functools.cached_property
    def peak(self) -> tuple[float, ...]:
        """For each rank the most memory it holds; with default costs `schedule.peak_live()`.

        >>> from jaxpar.pp import Costs, Schedule, simulate
        >>> simulate(Schedule([["0F0", "0F1", "0B0", "0B1"]]), Costs(activation=8)).peak
        (16,)
        """
        return tuple(
            max((held for _, held in self._held(rank)), default=0.0) for rank in range(len(self.events))
        )

    def _held(self, rank: int) -> Iterator[tuple[float, float]]:
        """(time, memory) after every change, in order; changes of one moment follow each other."""
        stages = self.schedule.stages_of_rank(rank)
        weights = [weight for stage in stages for weight in self.costs.memory(stage)]
        whole_of = {stage: 2 * position for position, stage in enumerate(stages)}
        counts = [0] * len(weights)  # of each stage: whole activations, then remains that wait for W

        def total() -> float:
            return sum(count * weight for count, weight in zip(counts, weights, strict=True))

        for event in self.events[rank]:
            before = list(counts)
            for part in event.action.parts:
                counts[whole_of[part.stage]] += part.op == Op.F
            if counts != before:
                yield event.start, total()
            before = list(counts)
            for part in event.action.parts:
                whole = whole_of[part.stage]
                if part.op in BACKWARD or (part.op == Op.F and self.schedule.is_forward_only):
                    counts[whole] -= 1
                counts[whole + 1] += (part.op == Op.I) - (part.op == Op.W)
            if counts != before:
                yield event.end, total()

    def __str__(self) -> str:
        columns = (self.busy, self.idle, self.bubble_fraction, self.peak)
        cells = [("rank", "busy", "idle", "bubble", "peak memory")]
        for rank, (busy, idle, bubble, peak) in enumerate(zip(*columns, strict=True)):
            cells.append((str(rank), f"{busy:g}", f"{idle:g}", f"{bubble:.1%}", f"{peak:g}"))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells
        ]
        mean_bubble = sum(self.bubble_fraction) / len(self.events)
        return "\n".join([f"makespan {self.makespan:g}, {100 * mean_bubble:.1f} % idle", *lines])

    __repr__ = __str__
