"""Which ranks hang, where each of them is, and who is missing: as data and as a table.

rank  host  silent  doing                 where
   0  a        61 s  barrier 'epoch'       train.py:40 in main
   1  a        75 s  step 12               data.py:17 in read          <- the others wait for it
   2  b        61 s  barrier 'epoch'       train.py:40 in main

A worker hangs if it notes nothing for `--hang-timeout`, or does not leave a block of `jaxpar_launch.timer.expires` in time.
"""

import collections
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxpar_launch._run import STACKS_FILE, STACKS_SIGNAL
from jaxpar_launch._worker import Worker
from jaxpar_launch.flight import FILE_NAME, Limit, count_notes, read_limit, read_notes

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
_NOT_THE_USERS = (
    "site-packages",
    "<frozen",
    f"{os.sep}jaxpar{os.sep}",
    os.path.dirname(os.__file__),
    os.path.dirname(__file__),
)
_DUMP_S = 1.0
_LOOK_S = 0.2


@dataclass(frozen=True)
class Place:
    """Where one rank is.

    Args:
        rank: which.
        host: of which host.
        pid: its process.
        silent_s: for how long it has noted nothing.
        doing: what it noted last, or "".
        where: the frame of the script's own code that its main thread is in, or "".
        late: what it has not left in time: "'read a batch' within 30 s", or "".
    """

    rank: int
    host: str
    pid: int
    silent_s: float
    doing: str
    where: str
    late: str = ""

    def to_wire(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class Watchdog:
    """Watches workers that note what they do, and those that set themselves a limit.

    Args:
        workers: of this host.
        timeout_s: how long one of them may note nothing; None: for ever.
    """

    def __init__(self, workers: Sequence[Worker], timeout_s: float | None) -> None:
        self._workers, self._timeout_s = workers, timeout_s
        self._seen: dict[int, tuple[int, float]] = {}
        self._look_at = 0.0

    def has_hung(self) -> bool:
        """Whether a worker that has noted something has noted nothing for too long, or has not kept its limit."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + (_LOOK_S if self._timeout_s is None else min(_LOOK_S, self._timeout_s / 4))
        running = [worker for worker in self._workers if worker.is_running]
        return any([self._is_silent(worker, now) or _late(worker) is not None for worker in running])

    def _is_silent(self, worker: Worker, now: float) -> bool:
        if self._timeout_s is None:
            return False
        count = count_notes(os.path.join(worker.folder, FILE_NAME))
        before, since = self._seen.get(worker.pid, (0, now))
        if count != before:
            self._seen[worker.pid] = (count, now)
        return count == before and count > 0 and now - since > self._timeout_s


def _late(worker: Worker) -> Limit | None:
    limit = read_limit(os.path.join(worker.folder, FILE_NAME))
    return limit if limit is not None and time.monotonic() > limit.ends_at else None


def places_of(workers: Sequence[Worker], host: str) -> tuple[Place, ...]:
    """Where the running workers of this host are; they are made to write their stacks."""
    running = [worker for worker in workers if worker.is_running]
    # Before they are asked: the signal may end the system call in which one of them hangs.
    places = [_without_stack(worker, host) for worker in running]
    for worker in running:
        worker.send(STACKS_SIGNAL)
    stacks = [os.path.join(worker.folder, STACKS_FILE) for worker in running]
    until = time.monotonic() + _DUMP_S
    while not all(map(_is_written, stacks)) and time.monotonic() < until:
        time.sleep(0.02)
    return tuple(replace(place, where=place_in(stack)) for place, stack in zip(places, stacks, strict=True))


def _without_stack(worker: Worker, host: str) -> Place:
    notes, late = read_notes(os.path.join(worker.folder, FILE_NAME), 1), _late(worker)
    silent_s = time.time() - notes[-1].time_s if notes else 0.0
    if late is not None and not notes:
        silent_s = time.monotonic() - late.ends_at + late.after_s
    return Place(
        rank=worker.env.rank,
        host=host,
        pid=worker.pid,
        silent_s=silent_s,
        doing=notes[-1].text if notes else "",
        where="",
        late="" if late is None else str(late),
    )


def place_in(path: str) -> str:
    """The innermost frame of the script's own code in a file of stacks; of the main thread, which comes last."""
    try:
        with open(path, errors="replace") as file:
            text = file.read()
    except OSError:
        return ""
    threads = _THREAD.split(text)
    frames = [*_FRAME.finditer(threads[-1])]
    own = [frame for frame in frames if not any(part in frame["file"] for part in _NOT_THE_USERS)]
    for frame in own or frames:
        return f"{os.path.basename(frame['file'])}:{frame['line']} in {frame['name']}"
    return ""


def _is_written(path: str) -> bool:
    """Whether it holds the main thread's stack to its end."""
    try:
        with open(path, errors="replace") as file:
            return "_run.py" in file.read()
    except OSError:
        return False


def summary(places: Iterable[Place]) -> str:
    """Who waits where, and who is missing, or who did not leave what in time; in one line."""
    places = list(places)
    if late := _grouped([place for place in places if place.late], "late"):
        said = [f"{_ranks(some)} did not leave {what}" for what, some in late.items()]
        others = _grouped([place for place in places if place.doing and not place.late], "doing")
        said += [f"{_ranks(some)} in {doing}" for doing, some in others.items()]
        return f"no progress: {'; '.join(said)}"
    by_doing = _grouped(places, "doing")
    if not by_doing:
        return "no worker makes progress"
    if len(by_doing) == 1:
        ((doing, some),) = by_doing.items()
        return f"no progress: {_ranks(some)} in {doing}"
    # The larger group waits; of equal ones that which came to its place later, for the other is still before it.
    waiting = max(
        by_doing, key=lambda doing: (len(by_doing[doing]), -max(p.silent_s for p in by_doing[doing]))
    )
    others = [f"{_ranks(some)} in {doing}" for doing, some in by_doing.items() if doing != waiting]
    verb = "wait" if len(by_doing[waiting]) > 1 else "waits"
    return f"no progress: {_ranks(by_doing[waiting])} {verb} in {waiting}; missing: {', '.join(others)}"


def table(places: Sequence[Place]) -> str:
    """For people."""
    rows = [("rank", "host", "pid", "silent", "doing", "where", "")]
    rows += [
        (
            str(p.rank),
            p.host,
            str(p.pid),
            f"{p.silent_s:.0f} s",
            p.doing,
            p.where,
            p.late and f"<- not out of {p.late}",
        )
        for p in sorted(places, key=lambda p: p.rank)
    ]
    if not any(place.host for place in places):  # read from a folder: of one host, and long ended
        rows = [(row[0], *row[3:]) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _grouped(places: Sequence[Place], by: str) -> dict[str, list[Place]]:
    groups: dict[str, list[Place]] = collections.defaultdict(list)
    for place in places:
        groups[getattr(place, by) or "no note"].append(place)
    return groups


def _ranks(places: Sequence[Place]) -> str:
    numbers = sorted(place.rank for place in places)
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"
