"""A timeline as a trace that Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) open.

thread "rank 0"  [0F0][0F1]   [0B0 ]        one thread for each rank, one slice for each action
                     `---> [1F1]            an arrow for each message
counter "memory of rank 0"  1 2 2 1         what its activations hold
"""

import itertools
from typing import Any

from jaxpar.pp._schedule._action import COMPUTE, Action, Op
from jaxpar.pp._schedule._timeline import Event, Message, Timeline

_MICROSECONDS = 1e6  # in the second that the costs are taken to be in
_INSIDE = (
    0.01  # of its slice: how far before the end of a slice an arrow leaves, so that it belongs to this slice
)

TraceEvent = dict[str, Any]


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in Chrome's trace event format; one unit of the costs is one second.

    Source: the chrome-trace dump of PyTorch's pipeline runtime (row 9.2).

    Args:
        timeline: What `simulate` returned.

    Returns:
        A dict for `json.dump`: one thread for each rank, counters of the memory of activations, arrows for messages.

    Example:
        >>> from jaxpar.pp import Schedule, simulate
        >>> trace = chrome_trace(simulate(Schedule([["0F0", "0B0"]])))
        >>> [(event["name"], event["ts"], event["dur"]) for event in trace["traceEvents"] if event["ph"] == "X"]
        [('0F0', 0.0, 1000000.0), ('0B0', 1000000.0, 2000000.0)]
    """
    ranks = range(len(timeline.events))
    events = [
        *(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": r, "args": {"name": f"rank {r}"}}
            for r in ranks
        ),
        *(
            {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": r, "args": {"sort_index": r}}
            for r in ranks
        ),
        *(_slice(event) for row in timeline.events for event in row),
        *(_counter(rank, time, held) for rank in ranks for time, held in timeline.live(rank)),
        *_arrows(timeline),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(event: Event) -> TraceEvent:
    action = event.action
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.op.value,
        "pid": 0,
        "tid": event.rank,
        "ts": event.start * _MICROSECONDS,
        "dur": event.duration * _MICROSECONDS,
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }


def _counter(rank: int, time: float, held: float) -> TraceEvent:
    name = f"memory of rank {rank}"
    return {
        "ph": "C",
        "name": name,
        "pid": 0,
        "tid": rank,
        "ts": time * _MICROSECONDS,
        "args": {"held": held},
    }


def _arrows(timeline: Timeline) -> list[TraceEvent]:
    """Two trace events for each message: out of the slice that made it, into the slice that uses it."""
    events = {
        _flow(part): event
        for row in timeline.events
        for event in row
        for part in event.action.parts
        if part.op in COMPUTE and part.op != Op.W
    }
    pairs = ((_arrow(message, events), number) for number, message in enumerate(timeline.messages))
    return list(itertools.chain.from_iterable(_ends(*arrow, number) for arrow, number in pairs))


def _arrow(message: Message, events: dict[tuple[int, bool, int | None], Event]) -> tuple[Event, Event, str]:
    stage, is_forward, microbatch = _flow(message.action)
    maker = events[stage, is_forward, microbatch]
    user = events[stage + (1 if is_forward else -1), is_forward, microbatch]
    return maker, user, "activation" if is_forward else "gradient"


def _ends(maker: Event, user: Event, name: str, number: int) -> tuple[TraceEvent, TraceEvent]:
    common = {"name": name, "cat": "message", "id": number, "pid": 0}
    leaves = (maker.end - _INSIDE * maker.duration) * _MICROSECONDS
    return (
        {**common, "ph": "s", "tid": maker.rank, "ts": leaves},
        {**common, "ph": "f", "bp": "e", "tid": user.rank, "ts": user.start * _MICROSECONDS},
    )


def _flow(part: Action) -> tuple[int, bool, int | None]:
    return part.stage, part.op in (Op.F, Op.SEND_F), part.microbatch
