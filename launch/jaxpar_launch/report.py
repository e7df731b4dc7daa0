"""`python -m jaxpar_launch.report LOG_DIR`: what a job's log folder says of its last attempt, after the fact (row G4).

    attempt 1, 2 workers
      rank  silent  doing            where
      0     0 s     barrier 'epoch'  train.py:40 in main
      1     14 s    step 12          data.py:17 in read
      no progress: rank 0 waits in barrier 'epoch'; missing: rank 1 in step 12
      local rank 1 failed: ValueError: boom
      the launcher ended: exit code 1: jaxpar-launch: rank 1 failed first and ended the job.

Reads flight.bin, stacks.txt and error.json of each worker. With `--notes N`, the last N notes of each rank too. With `--events`
what happened instead, in the order of time, from events.jsonl of all launchers that wrote into LOG_DIR (`_timeline.py`).
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from jaxpar_launch._events import FILE_NAME as EVENTS
from jaxpar_launch._hang import Place, place_in, summary, table
from jaxpar_launch._run import STACKS_FILE
from jaxpar_launch._timeline import WELL, end_of, runs_of_a_job, timeline
from jaxpar_launch.flight import FILE_NAME, Limit, Note, read_limit, read_notes


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; 2 if there is no such folder."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxpar_launch.report", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("log_dir", help="what --log-dir named, or the folder of one run in it")
    parser.add_argument("--attempt", type=int, help="which attempt [the last]")
    parser.add_argument(
        "--notes", type=int, default=0, metavar="N", help="the last N notes of each rank too [0]"
    )
    parser.add_argument("--events", action="store_true", help="what happened when, on all hosts, instead")
    options = parser.parse_args(argv)
    if options.events:
        return _print_events(options.log_dir)
    run = _run_folder(options.log_dir)
    if run is None:
        print(
            f"{options.log_dir} holds no run of jaxpar-launch: no folder attempt_0 in it or below.",
            file=sys.stderr,
        )
        return 2
    attempts = sorted(
        int(name.removeprefix("attempt_")) for name in os.listdir(run) if name.startswith("attempt_")
    )
    attempt = attempts[-1] if options.attempt is None else options.attempt
    if attempt not in attempts:
        print(f"{run} holds no attempt {attempt}, but {attempts}.", file=sys.stderr)
        return 2
    end = end_of(run) if attempt == attempts[-1] else ""
    print(report_of(os.path.join(run, f"attempt_{attempt}"), attempt, options.notes, end=end))
    return 0


def _print_events(log_dir: str) -> int:
    runs = runs_of_a_job(log_dir)
    if not runs:
        print(f"{log_dir} holds no {EVENTS} of a jaxpar-launch, in it or below.", file=sys.stderr)
        return 2
    print(timeline(runs))
    return 0


def report_of(folder: str, attempt: int, num_notes: int, *, end: str = "") -> str:
    """The report of one attempt; with how the launcher ended after it, if that is known."""
    workers = sorted((name for name in os.listdir(folder) if name.isdigit()), key=int)
    notes = {name: read_notes(os.path.join(folder, name, FILE_NAME)) for name in workers}
    newest = max((some[-1].time_s for some in notes.values() if some), default=0.0)
    places = [
        Place(
            rank=int(name),
            host="",
            pid=0,
            silent_s=newest - notes[name][-1].time_s if notes[name] else 0.0,
            doing=_doing(notes[name], read_limit(os.path.join(folder, name, FILE_NAME))),
            where=place_in(os.path.join(folder, name, STACKS_FILE)),
        )
        for name in workers
    ]
    lines = [
        f"attempt {attempt}, {len(workers)} workers of this host; silent: before the last note of any",
        table(places),
    ]
    if end != WELL:
        lines.append(f"  {summary(places)}")
    for name in workers:
        if (words := _last_words(os.path.join(folder, name, "error.json"))) is not None:
            lines.append(f"  local rank {name} failed: {words}")
        last = notes[name][-num_notes:] if num_notes else ()
        lines += [f"  local rank {name} {note.time_s - newest:9.3f} s  {note.text}" for note in last]
    if end:
        lines.append(f"  the launcher ended: {end}")
    return "\n".join(lines)


def _doing(notes: Sequence[Note], limit: Limit | None) -> str:
    """The last note, and the block with a limit (`jaxpar_launch.timer`) in which it ended."""
    parts = [note.text for note in notes[-1:]] + ([] if limit is None else [f"in {limit}"])
    return "; ".join(parts)


def _run_folder(path: str) -> str | None:
    """The folder of a run: this one, or the newest in it."""
    if os.path.isdir(os.path.join(path, "attempt_0")):
        return path
    try:
        runs = [
            entry.path for entry in os.scandir(path) if os.path.isdir(os.path.join(entry.path, "attempt_0"))
        ]
    except OSError:
        return None
    return max(runs, key=os.path.getmtime, default=None)


def _last_words(path: str) -> str | None:
    try:
        with open(path) as file:
            return str(json.load(file)["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


if __name__ == "__main__":
    raise SystemExit(main())
