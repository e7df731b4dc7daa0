"""The way of a worker's output: from its pipe, line by line, to console, files, memory and the failure report.

    worker --pipe--> Stream.feed --+-- tail            last lines, for the report
                                   +-- FileSink        raw bytes               (--tee)
                                   +-- ConsoleSink     "[rank 1] line\n"       one write per line, never mixed
                                   +-- MemorySink      raw bytes               (launch(...) of tests)

A line ends with LF or with CR: a progress bar that redraws itself by CR keeps doing so. When the launcher's
output is a terminal, local rank 0 writes to it directly (see `_worker.py`), for only a real terminal shows a
rich progress bar; nothing of that passes here.
"""

import os
import select
from collections import deque
from typing import Protocol

MAX_LINE_BYTES = 1 << 16
NUM_TAIL_LINES = 20
_READ_BYTES = 1 << 16


class Sink(Protocol):
    """Takes what a worker writes."""

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class LineSplitter:
    """Cuts a byte stream into lines, each with its terminator; what has none yet waits for it.

    Example:
        >>> splitter = LineSplitter()
        >>> splitter.feed(b"one\\ntwo"), splitter.feed(b"!\\r50%"), splitter.flush()
        ([b'one\\n'], [b'two!\\r'], [b'50%'])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Adds bytes; returns the lines they complete."""
        lines = (self._rest + chunk).splitlines(keepends=True)
        is_open = lines and not lines[-1].endswith(b"\n")  # a CR at the very end waits: LF may follow it
        self._rest = lines.pop() if is_open and len(lines[-1]) < MAX_LINE_BYTES else b""
        return lines

    def flush(self) -> list[bytes]:
        """Returns what is left, a line without terminator."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class ConsoleSink:
    """Writes to a file descriptor of the launcher, whole lines with a prefix, or raw bytes if the prefix is empty."""

    def __init__(self, fd: int, prefix: str) -> None:
        self._fd, self._prefix, self._splitter = fd, prefix.encode(), LineSplitter()
        self._is_broken = False

    def feed(self, chunk: bytes) -> None:
        """Writes the lines that are complete now."""
        if not self._prefix:
            return self._write(chunk)
        for line in self._splitter.feed(chunk):
            if line.strip(b"\r\n") or line.endswith(b"\n"):  # a bar's leading CR is not an empty line
                self._write(self._prefix + line)

    def close(self) -> None:
        """Writes the last line even if it is not terminated, and terminates it."""
        for line in self._splitter.flush():
            self._write(self._prefix + line.rstrip(b"\r") + b"\n")

    def _write(self, data: bytes) -> None:
        while data and not self._is_broken:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # someone made our output non-blocking: wait as a blocking write would
                select.select([], [self._fd], [])
            except OSError:  # the reader has gone (`| head`): the job goes on in silence
                self._is_broken = True


class FileSink:
    """Writes the raw bytes to a file as they come."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "wb", buffering=0)

    def feed(self, chunk: bytes) -> None:
        """Writes the bytes."""
        self._file.write(chunk)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class MemorySink:
    """Collects the bytes of one or several streams in the order of their arrival."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def feed(self, chunk: bytes) -> None:
        """Keeps the bytes."""
        self._chunks.append(chunk)

    def close(self) -> None:
        """Nothing to do."""

    def text(self) -> str:
        """All that came, decoded; bytes that are not UTF-8 are replaced."""
        return b"".join(self._chunks).decode(errors="replace")


class TailSink:
    """Keeps the last lines; a worker's two streams share one, so lines stand in the order of their arrival."""

    def __init__(self, lines: deque[str]) -> None:
        self._lines, self._splitter = lines, LineSplitter()

    def feed(self, chunk: bytes) -> None:
        """Keeps the lines that are complete now."""
        self._keep(self._splitter.feed(chunk))

    def close(self) -> None:
        """Keeps the last line even if it is not terminated."""
        self._keep(self._splitter.flush())

    def _keep(self, lines: list[bytes]) -> None:
        texts = (line.decode(errors="replace").rstrip() for line in lines)
        self._lines.extend(text for text in texts if text)


class Stream:
    """The launcher's end of one pipe, and the sinks behind it."""

    def __init__(self, fd: int, sinks: list[Sink]) -> None:
        os.set_blocking(fd, False)
        self.fd, self._sinks, self.is_open = fd, sinks, True

    def pump(self) -> bool:
        """Moves some of what is in the pipe to the sinks; True if there was any. Closes itself at its end."""
        if not self.is_open:
            return False
        try:
            chunk = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        for sink in self._sinks if chunk else ():
            sink.feed(chunk)
        if not chunk:
            self.close()
        return bool(chunk)

    def close(self) -> None:
        """Closes the pipe and the sinks; once."""
        if self.is_open:
            self.is_open = False
            os.close(self.fd)
            for sink in self._sinks:
                sink.close()


def last_lines(path: str, *, num_bytes: int = 8192) -> list[str]:
    """The last lines of a file that a worker wrote by itself (`--redirects`)."""
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - num_bytes, 0))
        text = file.read().decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-NUM_TAIL_LINES:]
