"""The flight recorder of a worker: what it did last, in a file that the launcher reads while it runs and after it died.

    worker     note("step 12") -> a slot of a memory-mapped file: no system call, about a microsecond
               begin(30, "read") ... end(it)   the same for a piece of work with a limit (`jaxpar_launch.timer.expires`)
    launcher   has the count moved since I last looked?        --hang-timeout
               is a limit over?                                always
               the last slots of every rank                    who waits where, and who is missing

`jaxpar` notes each step, each pipeline action and each meeting; any other script may call `heartbeat()`, or nothing, and is then
never taken for hung. Outside a launcher all of this does nothing.

    count u64 | limit | slot: time f64, length u16, text ... | slot | ...  the slot of note n is n modulo their number
    limit: is being written u8, ends f64, after f64, length u16, text ...  of those that are open the one that ends first; 0: none
"""

import contextlib
import functools
import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass

from jaxpar_launch.env import WorkerEnv

FILE_NAME = "flight.bin"
_COUNT, _HEAD, _LIMIT = struct.Struct("<Q"), struct.Struct("<dH"), struct.Struct("<ddH")
_SLOT_BYTES, _NUM_SLOTS = 256, 256
_TEXT_BYTES = _SLOT_BYTES - _HEAD.size
_IS_WRITTEN = _COUNT.size  # a byte: it is there at once, or not at all
_LIMIT_TEXT = _IS_WRITTEN + 1 + _LIMIT.size
_LIMIT_TEXT_BYTES = 200
_SLOTS = _LIMIT_TEXT + _LIMIT_TEXT_BYTES
_FILE_BYTES = _SLOTS + _NUM_SLOTS * _SLOT_BYTES


@dataclass(frozen=True)
class Note:
    """One thing that a worker did, and when it began (seconds since the epoch)."""

    time_s: float
    text: str


@dataclass(frozen=True)
class Limit:
    """A piece of work that shall be over in time.

    Args:
        ends_at: when, by `time.monotonic()`, which all processes of a host share.
        after_s: how long it may take.
        scope: what it is.
    """

    ends_at: float
    after_s: float
    scope: str

    def __str__(self) -> str:
        return f"{self.scope} within {self.after_s:g} s"


class FlightRecorder:
    """Writes notes, of which the file keeps the last ones, and the limit that ends first.

    Args:
        path: of the file; made new.
    """

    def __init__(self, path: str) -> None:
        with open(path, "w+b") as file:
            file.truncate(_FILE_BYTES)
            self._memory = mmap.mmap(file.fileno(), _FILE_BYTES)
        self._count = 0
        self._limits: list[Limit] = []
        self._lock = threading.Lock()

    def note(self, text: str) -> None:
        """Notes what begins now; a long text is cut."""
        data = text.encode("utf-8", "replace")[:_TEXT_BYTES]
        with self._lock:
            place = _SLOTS + self._count % _NUM_SLOTS * _SLOT_BYTES
            _HEAD.pack_into(self._memory, place, time.time(), len(data))
            self._memory[place + _HEAD.size : place + _HEAD.size + len(data)] = data
            self._count += 1
            _COUNT.pack_into(self._memory, 0, self._count)

    def begin(self, after_s: float, scope: str) -> Limit:
        """Begins a piece of work that may take so long."""
        limit = Limit(time.monotonic() + after_s, after_s, scope)
        with self._lock:
            self._limits.append(limit)
            self._write_limit()
        return limit

    def end(self, limit: Limit) -> None:
        """It is over."""
        with self._lock:
            self._limits.remove(limit)
            self._write_limit()

    def _write_limit(self) -> None:
        limit = min(self._limits, key=lambda limit: limit.ends_at, default=Limit(0.0, 0.0, ""))
        data = limit.scope.encode("utf-8", "replace")[:_LIMIT_TEXT_BYTES]
        # Whoever looks now looks again: half a number may be one that is long past.
        self._memory[_IS_WRITTEN] = 1
        _LIMIT.pack_into(self._memory, _IS_WRITTEN + 1, limit.ends_at, limit.after_s, len(data))
        self._memory[_LIMIT_TEXT : _LIMIT_TEXT + len(data)] = data
        self._memory[_IS_WRITTEN] = 0


@functools.cache
def recorder() -> FlightRecorder | None:
    """This worker's recorder; None outside a launcher."""
    worker = WorkerEnv.from_environ()
    if worker is None or worker.error_file is None:
        return None
    with contextlib.suppress(OSError):  # a full disk is no reason to stop training
        return FlightRecorder(os.path.join(os.path.dirname(worker.error_file), FILE_NAME))
    return None


def heartbeat(text: str = "alive") -> None:
    """Tells the launcher that this worker makes progress, and what it does now (row G3).

    With `--hang-timeout S` a worker that has called this once, and then not for S seconds, is taken for hung.

    Args:
        text: what begins now, for the table of a hang: "step 12", "evaluation".

    Example:
        >>> heartbeat("step 12")
    """
    if (mine := recorder()) is not None:
        mine.note(text)


def read_notes(path: str, most: int = _NUM_SLOTS) -> tuple[Note, ...]:
    """The last notes in a recorder's file, the newest last; none if there is no such file.

    Args:
        path: of the file.
        most: how many.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return ()
    if len(data) < _FILE_BYTES:
        return ()
    count = _COUNT.unpack_from(data)[0]
    notes = []
    for number in range(max(0, count - min(most, _NUM_SLOTS)), count):
        place = _SLOTS + number % _NUM_SLOTS * _SLOT_BYTES
        time_s, length = _HEAD.unpack_from(data, place)
        text = data[place + _HEAD.size : place + _HEAD.size + min(length, _TEXT_BYTES)]
        notes.append(Note(time_s, text.decode("utf-8", "replace")))
    return tuple(notes)


def count_notes(path: str) -> int:
    """How many notes were written; 0 if there is no such file."""
    data = _start_of(path)
    return _COUNT.unpack_from(data)[0] if data else 0


def read_limit(path: str) -> Limit | None:
    """Of the pieces of work that are under way the limit that ends first; None if there is none, or it changes just now."""
    data = _start_of(path)
    if not data or data[_IS_WRITTEN] or data != _start_of(path):
        return None
    ends_at, after_s, length = _LIMIT.unpack_from(data, _IS_WRITTEN + 1)
    text = data[_LIMIT_TEXT : _LIMIT_TEXT + min(length, _LIMIT_TEXT_BYTES)]
    return Limit(ends_at, after_s, text.decode("utf-8", "replace")) if ends_at else None


def _start_of(path: str) -> bytes:
    """What stands before the slots; nothing if there is no such file."""
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read(_SLOTS)
    except OSError:
        return b""
    return data if data is not None and len(data) == _SLOTS else b""
