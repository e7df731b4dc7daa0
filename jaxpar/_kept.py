"""A folder of compiled programs, one file for each, that a killed process cannot leave half written.

    jit_train_step-3f2a...  =  sha256(name + program) | program

    put   temporary file -> rename; then, while the folder is larger than allowed, the file goes that was used longest ago
    get   read -> compare the checksum -> the program; a file that does not agree is removed: None, it is compiled again

Several processes may use one folder. A failure to read or write costs a compilation and one warning, never the job.
"""

import contextlib
import hashlib
import os
import re
import tempfile
import time
import warnings
from pathlib import Path

_DIGEST_BYTES = 32
_TEMPORARY = ".part"
_ABANDONED_S = 3600.0


class KeptPrograms:
    """Programs by the text of everything that they depend on.

    Args:
        folder: Where the files lie; made when needed, for this user only.
        world: What all keys depend on besides the program: versions, devices, processes.
        max_bytes: How large the folder may become.
    """

    def __init__(self, folder: Path, *, world: str, max_bytes: int) -> None:
        self._folder = folder
        self._world = world
        self._max_bytes = max_bytes
        self._warned: set[str] = set()

    def get(self, key: str) -> bytes | None:
        """The program that was put under this key; None if it is not there, or not whole."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._warn("read", f"{path} cannot be read ({error.strerror})")
        digest, program = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest != _digest(path.name, program):
            with contextlib.suppress(OSError):
                path.unlink()
            return self._warn("check", f"{path} is damaged, and was removed")
        with contextlib.suppress(OSError):
            os.utime(path)  # the time of last use, by which files go
        return program

    def put(self, key: str, program: bytes) -> None:
        """Keeps a program, if it fits and the folder can be written."""
        path = self._path(key)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._make_room(_DIGEST_BYTES + len(program), for_=path):
                _write_whole(path, _digest(path.name, program) + program)
        except OSError as error:
            self._warn("write", f"{path} cannot be written ({error.strerror})")

    def _path(self, key: str) -> Path:
        """A file whose name begins with the function's, for whoever looks into the folder."""
        name = re.sub(r"\W+", "_", key.rsplit("-", 1)[0])[:80]
        digest = hashlib.sha256("\n".join((self._world, key)).encode()).hexdigest()
        return self._folder / f"{name}-{digest}"

    def _make_room(self, num_bytes: int, *, for_: Path) -> bool:
        """Removes what was used longest ago until so many bytes fit in; False if they never do."""
        if num_bytes > self._max_bytes:
            self._warn("size", f"{for_.name} has {num_bytes} bytes, more than the {self._max_bytes} allowed")
            return False
        files = _files(self._folder)
        total = sum(stat.st_size for stat, _ in files)
        for stat, path in sorted(files, key=lambda file: file[0].st_mtime):
            is_abandoned = path.suffix == _TEMPORARY and stat.st_mtime < time.time() - _ABANDONED_S
            if total + num_bytes > self._max_bytes or is_abandoned:
                path.unlink(missing_ok=True)
                total -= stat.st_size
        return True

    def _warn(self, kind: str, what: str) -> None:
        """Says it once of each kind, for a broken disk would say it for each program."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"kept programs: {what}; the program is compiled.", RuntimeWarning, stacklevel=2)


def _digest(name: str, program: bytes) -> bytes:
    """Of the name too, so that a file that was renamed by hand is no other program."""
    return hashlib.sha256(name.encode() + b"\n" + program).digest()


def _files(folder: Path) -> list[tuple[os.stat_result, Path]]:
    """The files of the folder; one that another process removes meanwhile is not there."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if not path.is_dir():
                found.append((path.stat(), path))
    return found


def _write_whole(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=_TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
