"""Timelines beside each other on one clock: what was measured over what was simulated.

measured    rank 0  [0][1][ 0  ]...        one panel, and one process of the trace, for each
simulated   rank 0  [0][1][ 0 ]..
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._render._figure import draw
from jaxpar.pp._schedule._render._render import save
from jaxpar.pp._schedule._render._trace import chrome_trace
from jaxpar.pp._schedule._timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_trace_path(path: Path) -> None:
    """Refuses a path where no trace can be, before anything runs.

    Raises:
        ScheduleError: it does not end in .json, or its folder does not exist.
    """
    if not path.parent.is_dir():
        raise ScheduleError(
            f"a trace is written to {str(path)!r}, but {str(path.parent)!r} is no folder. Make it first."
        )
    if path.suffix != ".json":
        raise ScheduleError(
            f"a trace is a .json file, and {str(path)!r} is none; its picture is written beside it. Write "
            f"{str(path.with_suffix('.json'))!r}."
        )


def render_beside(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Writes a trace of all timelines to `path`, and a picture of them beside it, as .svg.

    Args:
        timelines: by name.
        path: ends in .json.
    """
    path.write_text(json.dumps(joined_trace(timelines)), encoding="utf-8")
    save(_drawn(timelines), path.with_suffix(".svg"))


def joined_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """One trace with a process for each timeline."""
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for event in chrome_trace(timeline)["traceEvents"]:
            own = {"id": f"{name} {event['id']}"} if "id" in event else {}
            events.append({**event, "pid": pid, **own})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _drawn(timelines: Mapping[str, Timeline]) -> "Figure":
    from matplotlib.figure import Figure

    num = len(timelines)
    ranks = max(len(timeline.events) for timeline in timelines.values())
    figure = Figure(figsize=(12.0, num * (0.32 * ranks + 0.8)), layout="constrained")
    axes = figure.subplots(num, 1, sharex=True, squeeze=False)[:, 0]
    for ax, (name, timeline) in zip(axes, timelines.items(), strict=True):
        draw(timeline, ax)
        ax.set_title(f"{name}: {timeline.makespan:.4g}", loc="right", fontsize=9)
        ax.set_xlabel("")
    axes[-1].set(xlabel="time", xlim=(0, max(timeline.makespan for timeline in timelines.values())))
    return figure
