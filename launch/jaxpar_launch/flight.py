"""The flight recorder of a worker: what it did last, in a file that the launcher reads while it runs and after it died.

    worker     note("step 12") -> a slot of a memory-mapped file: no system call, about a microsecond
    launcher   has the count moved since I last looked?        --hang-timeout
               the last slots of every rank                    who waits where, and who is missing

`jaxpar` notes each step, each pipeline action and each meeting; any other script may call `heartbeat()`, or nothing, and is then
never taken for hung. Outside a launcher all of this does nothing.

    count u64 | slot: time f64, length u16, text ... | slot | ...          the slot of note n is n modulo their number
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
_COUNT, _HEAD = struct.Struct("<Q"), struct.Struct("<dH")
_SLOT_BYTES, _NUM_SLOTS = 256, 256
_TEXT_BYTES = _SLOT_BYTES - _HEAD.size


@dataclass(frozen=True)
class Note:
    """One thing that a worker did, and when it began (seconds since the epoch)."""

    time_s: float
    text: str


class FlightRecorder:
    """Writes notes; the file keeps the last ones.

    Args:
        path: of the file; made new.
    """

    def __init__(self, path: str) -> None:
        size = _COUNT.size + _NUM_SLOTS * _SLOT_BYTES
        with open(path, "w+b") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        self._count = 0
        self._lock = threading.Lock()

    def note(self, text: str) -> None:
        """Notes what begins now; a long text is cut."""
        data = text.encode("utf-8", "replace")[:_TEXT_BYTES]
        with self._lock:
            place = _COUNT.size + self._count % _NUM_SLOTS * _SLOT_BYTES
            _HEAD.pack_into(self._memory, place, time.time(), len(data))
            self._memory[place + _HEAD.size : place + _HEAD.size + len(data)] = data
            self._count += 1
            _COUNT.pack_into(self._memory, 0, self._count)


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
    if len(data) < _COUNT.size + _NUM_SLOTS * _SLOT_BYTES:
        return ()
    count = _COUNT.unpack_from(data)[0]
    notes = []
    for number in range(max(0, count - min(most, _NUM_SLOTS)), count):
        place = _COUNT.size + number % _NUM_SLOTS * _SLOT_BYTES
        time_s, length = _HEAD.unpack_from(data, place)
        text = data[place + _HEAD.size : place + _HEAD.size + min(length, _TEXT_BYTES)]
        notes.append(Note(time_s, text.decode("utf-8", "replace")))
    return tuple(notes)


def count_notes(path: str) -> int:
    """How many notes were written; 0 if there is no such file."""
    try:
        with open(path, "rb") as file:
            data = file.read(_COUNT.size)
    except OSError:
        return 0
    return _COUNT.unpack(data)[0] if len(data) == _COUNT.size else 0
