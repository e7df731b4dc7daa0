"""Who failed first and why: the failures of a group, ranked, as data and as text.

symptom?   a rank that lost its peer fails too ("Connection reset by peer"): never before the peer itself
when       the time in the error file (taken when the exception was caught), else the time of the exit
"""

import json
import os
import re
import signal
import time
from dataclasses import dataclass

from jaxpar_launch._worker import Worker

# What JAX's CPU, GPU and coordination layers say when *another* process has gone.
_PEER_LOSS = re.compile(
    r"Connection (?:reset|closed) by peer|Gloo .* failed|remote error|NCCL operation .* failed"
    r"|coordination service|PollForError|heartbeat timeout|Broken pipe",
    re.IGNORECASE,
)
_LAST_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_SCRIPT_RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_run.py")


@dataclass(frozen=True)
class Failure:
    """One failed worker (torchelastic's `ProcessFailure`, row E6).

    `exit_code` is negative for a signal, as in `subprocess`; `message` is the exception's text if there was one.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    exit_code: int
    time_s: float
    message: str | None
    file: str | None
    line: int | None
    tail: tuple[str, ...]

    @property
    def cause(self) -> str:
        """How the process ended: "exit code 3" or "signal 11 (SIGSEGV)"."""
        return exit_text(self.exit_code)

    @property
    def is_symptom(self) -> bool:
        """Whether it says itself that another process was lost."""
        text = self.message or "\n".join(self.tail)
        return bool(_PEER_LOSS.search(text)) and self.exit_code in (1, -signal.SIGABRT)

    @classmethod
    def of(cls, worker: Worker, host: str) -> "Failure":
        """What is known of a failed worker: from its error file, else from the end of its output."""
        assert worker.exit_code is not None and worker.ended_at is not None
        tail = worker.tail()
        known = _from_error_file(os.path.join(worker.folder, "error.json")) or _from_output(tail)
        return cls(
            rank=worker.env.rank,
            local_rank=worker.env.local_rank,
            host=host,
            pid=worker.pid,
            exit_code=worker.exit_code,
            time_s=known.get("time_s", worker.ended_at),
            message=known.get("message"),
            file=known.get("file"),
            line=known.get("line"),
            tail=tuple(tail),
        )


def ranked(failures: list[Failure]) -> tuple[Failure, ...]:
    """The root cause first, then the others in the order in which they probably happened."""
    return tuple(sorted(failures, key=lambda failure: (failure.is_symptom, failure.time_s)))


def exit_text(exit_code: int) -> str:
    """An exit code in words; signals by name.

    Example:
        >>> exit_text(3), exit_text(-11)
        ('exit code 3', 'signal 11 (SIGSEGV)')
    """
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal_name(-exit_code)
    return f"signal {-exit_code}" + (f" ({name})" if name != str(-exit_code) else "")


def signal_name(number: int) -> str:
    """A signal's name; its number, if it has none.

    Example:
        >>> signal_name(9), signal_name(40)
        ('SIGKILL', '40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def failure_text(root: Failure) -> str:
    """The root cause, for people."""
    when = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(root.time_s))
        + f".{int(root.time_s % 1 * 1000):03d}"
    )
    lines = [
        f"jaxpar-launch: rank {root.rank} failed first and ended the job.",
        f"  rank {root.rank} (local rank {root.local_rank}), host {root.host}, pid {root.pid}, at {when}",
        f"  {root.cause}" + (f": {root.message}" if root.message else ""),
    ]
    if root.file:
        lines.append(f"  at {root.file}:{root.line}")
    if root.tail:
        lines += ["  last lines of its output:", *(f"  | {line}" for line in root.tail)]
    return "\n".join(lines)


def _from_error_file(path: str) -> dict:
    try:
        with open(path) as file:
            message = json.load(file)["message"]
        extra = message["extraInfo"]
        return {
            "message": message["message"],
            "time_s": float(extra["timestamp"]),
            "file": extra.get("file"),
            "line": extra.get("line"),
        }
    except (OSError, ValueError, KeyError, TypeError):  # not written, or by something that is not ours
        return {}


def _from_output(tail: list[str]) -> dict:
    """The exception and its place from the end of a traceback, or of faulthandler's stack."""
    fatal = next((line for line in tail if line.startswith("Fatal Python error: ")), None)
    frames = [
        frame for line in tail if (frame := _LAST_FRAME.search(line)) and frame["file"] != _SCRIPT_RUNNER
    ]
    place = {}
    if frames:  # faulthandler names the innermost frame first, a traceback names it last
        frame = frames[0] if fatal else frames[-1]
        place = {"file": frame["file"], "line": int(frame["line"])}
    if fatal:
        return {"message": fatal.removeprefix("Fatal Python error: "), **place}
    if not any(line.startswith("Traceback (most recent call last)") for line in tail):
        return {}
    message = next((line for line in reversed(tail) if line and not line[0].isspace()), None)
    return {"message": message, **place}
