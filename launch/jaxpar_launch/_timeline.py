"""The events of a job as a timeline: those of all its launchers whose log folders lie side by side, in one order.

    from 2026-01-31T09:30:00.125Z
     0.000 s  node0  round 0  launched: 2 workers, pid 14038
     0.003 s  node1  round 0  launched: 2 workers, pid 9021
     1.512 s  node0  round 0  workers started: ranks 0-1
    61.020 s  node1  round 0  worker ended: rank 3, signal SIGKILL

Clocks of hosts need not agree: lines of one host are in their order, those of several as their clocks say.
"""

import json
import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jaxpar_launch._events import FILE_NAME
from jaxpar_launch._fates import ranges

Event = dict[str, Any]
WELL = "exit code 0"  # of `end_of`
_OF_WORKERS = ("worker_started", "worker_ended")


def runs_of_a_job(path: str) -> list[str]:
    """The folders of the launchers of one job: this one; or of those in it the newest, and others of its id at the same time."""
    if os.path.exists(os.path.join(path, FILE_NAME)):
        return [path]
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return []
    spans = {}
    for run in (os.path.join(path, name) for name in names):
        if events := read_events(run):
            spans[run] = (_seconds(events[0]), _seconds(events[-1]), events[0].get("run_id"))
    if not spans:
        return []
    chosen = [max(spans, key=lambda run: spans[run][1])]
    for run in sorted(
        spans, key=lambda run: -spans[run][1]
    ):  # one that left early met one that met the newest
        first, last, run_id = spans[run]
        if run not in chosen and any(
            first <= spans[other][1] and spans[other][0] <= last and run_id == spans[other][2]
            for other in chosen
        ):
            chosen.append(run)
    return sorted(chosen)


def end_of(run: str) -> str:
    """How a launcher ended, by the events in its folder; "" if they do not say."""
    ends = [event for event in read_events(run) if event["event"] == "ended"]
    return _told(ends[-1], ()) if ends else ""


def read_events(run: str) -> list[Event]:
    """The events in a folder, in their order; a line that is none is left out."""
    found = []
    try:
        with open(os.path.join(run, FILE_NAME), errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return []
    for line in lines:
        try:
            event = json.loads(line)
            _seconds(event)
        except (ValueError, KeyError, TypeError):
            continue
        found.append(event)
    return found


def timeline(runs: Sequence[str]) -> str:
    """The lines; workers of one host that start, or end in the same way, one after the other share a line."""
    events = sorted((event for run in runs for event in read_events(run)), key=_seconds)
    if not events:
        return "no events"
    begin_s = _seconds(events[0])
    groups: list[list[Event]] = []
    for event in events:
        if groups and event["event"] in _OF_WORKERS and _same(event) == _same(groups[-1][-1]):
            groups[-1].append(event)
        else:
            groups.append([event])
    host_width = max(len(event["host"]) for event in events)
    lines = [
        f"{_seconds(group[0]) - begin_s:9.3f} s  {group[0]['host']:<{host_width}}  round {group[0]['round']}  {_text(group)}"
        for group in groups
    ]
    return "\n".join([f"    from {events[0]['time']}", *lines])


def _same(event: Event) -> Event:
    return {name: value for name, value in event.items() if name not in ("time", "rank", "local_rank", "pid")}


def _text(group: list[Event]) -> str:
    event, what = group[0], group[0]["event"].replace("_", " ")
    if len(group) > 1:
        what = what.replace("worker", "workers")
    told = _told(event, [some["rank"] for some in group if "rank" in some])
    return f"{what}: {told}" if told else what


def _told(event: Event, ranks: Sequence[int]) -> str:
    match event["event"]:
        case "launched":
            return f"{event['nproc']} worker{'s' * (event['nproc'] != 1)}, pid {event['pid']}"
        case "rendezvous":
            return f"{_ranks(event['ranks'])} of {event['world_size']}, coordinator {event['coordinator']}"
        case "worker_started":
            return _ranks(ranks) + (f", pid {event['pid']}" if len(ranks) == 1 else "")
        case "worker_ended":
            return f"{_ranks(ranks)}, {_how(event)}"
        case "killed":
            return _ranks(event["ranks"])
        case "ended":
            return ": ".join(filter(None, [_how(event), event.get("text")]))
    return str(event.get("text") or event.get("name") or "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {ranges(sorted(ranks))}"


def _how(event: Event) -> str:
    return f"signal {event['signal']}" if "signal" in event else f"exit code {event.get('exit_code')}"


def _seconds(event: Event) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()
