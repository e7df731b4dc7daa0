"""How every worker of a job ended: as data, and as the table that closes the report of a failed job.

rank  host   pid    ended
0     node0  10187  stopped by the launcher: signal 15 (SIGTERM)
1     node0  10188  exit code 1: ValueError: boom                              <- failed first
2     node1  4711   exit code 1: Gloo all-reduce failed: Connection reset by peer
ranks 3-63 (61): stopped by the launcher: signal 15 (SIGTERM)                  <- of many workers those that were ended
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxpar_launch._report import Failure

MAX_ROWS = 8
_MAX_CHARS = 200


@dataclass(frozen=True)
class Fate:
    """How one worker ended.

    Args:
        rank: which.
        host: of which host.
        pid: its process; 0 if it is not known.
        ended: how, in words.
        is_failure: whether it failed by itself, not because it was ended.
        tail: the last lines of its output, of the first to fail on its host.
    """

    rank: int
    host: str
    pid: int
    ended: str
    is_failure: bool = False
    tail: tuple[str, ...] = ()

    @classmethod
    def of(cls, failure: Failure, *, is_first: bool) -> "Fate":
        """Of a worker that failed by itself."""
        ended = failure.cause
        if failure.message:
            ended += f": {failure.message}"
        elif failure.tail:
            ended += f"; its last line: {failure.tail[-1]}"
        return cls(
            failure.rank,
            failure.host,
            failure.pid,
            shortened(ended),
            is_failure=True,
            tail=tuple(map(shortened, failure.tail)) if is_first else (),
        )

    def to_wire(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "Fate":
        """From JSON."""
        return cls(**{**wire, "tail": tuple(wire["tail"])})


def table(fates: Iterable[Fate], *, first: int | None) -> list[str]:
    """The lines of the table; of more than `MAX_ROWS` workers, rows of those that failed and counts of the others.

    Example:
        >>> for line in table([Fate(0, "a", 71, "killed"), Fate(1, "a", 72, "exit code 3")], first=1):
        ...     print(line)
        rank  host  pid  ended
        0     a     71   killed
        1     a     72   exit code 3  <- failed first
    """
    fates = sorted(fates, key=lambda fate: fate.rank)
    rows, rest = list(fates), []
    if len(fates) > MAX_ROWS:
        failed = sorted((f for f in fates if f.is_failure), key=lambda f: f.rank != first)[:MAX_ROWS]
        rows = sorted(failed, key=lambda fate: fate.rank)
        rest = [fate for fate in fates if fate not in failed]
    cells = [("rank", "host", "pid", "ended")] if rows else []
    cells += [
        (str(f.rank), f.host, str(f.pid or "-"), f.ended + "  <- failed first" * (f.rank == first))
        for f in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    for ended in dict.fromkeys(fate.ended for fate in rest):
        ranks = [fate.rank for fate in rest if fate.ended == ended]
        lines.append(f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)} ({len(ranks)}): {ended}")
    return lines


def ranges(numbers: Sequence[int]) -> str:
    """Increasing numbers, neighbours taken together.

    Example:
        >>> ranges([0, 1, 2, 4, 6, 7])
        '0-2, 4, 6-7'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def shortened(text: str) -> str:
    """No longer than a line of a table should be.

    Example:
        >>> len(shortened("x" * 1000))
        200
    """
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
