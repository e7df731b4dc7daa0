"""The files of a checkpoint with sizes and checksums: written into it before it is committed, compared before it is read.

    files.json    {"model/d/5a7e..": [1048576, 3405691582], ...}     bytes, CRC-32

A file that was cut short or changed is named, and the checkpoint before it is used.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from jaxpar._errors import CheckpointError

LIST = "files.json"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # Path("gs://a") is "gs:/a"
_CHUNK_BYTES = 1 << 22
# Orbax renews these after the list is made, as its last act: they say when, and hold nothing of the model.
_LATER = ("_CHECKPOINT_METADATA", "commit_success.txt")


def local(path: str | Path) -> Path:
    """The path; an address would become a folder of that name here, and the bucket stay empty.

    Raises:
        CheckpointError: it is an address.
    """
    if _ADDRESS.match(str(path)):
        raise CheckpointError(
            f"{path} is an address. Checkpoints and weights lie in folders: mount the bucket (gcsfuse, s3fs, a CSI volume) and name its "
            f"folder, or copy complete checkpoints with the tools of the store."
        )
    return Path(path)


def complete_steps(folder: Path) -> list[int]:
    """The steps whose checkpoints are complete, in order: their folders have got their names."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def write_list(folder: Path, *, with_checksums: bool) -> None:
    """Lists the files of a checkpoint that is about to be committed; durable when it returns."""
    found = {
        str(path.relative_to(folder)): [path.stat().st_size, checksum(path) if with_checksums else None]
        for path in _files(folder)
    }
    with (folder / LIST).open("w") as out:
        json.dump(found, out)
        out.flush()
        os.fsync(out.fileno())


def faults(folder: Path, *, part: int = 0, num_parts: int = 1, with_checksums: bool = True) -> list[str]:
    """What is wrong with the files of a checkpoint: missing, of another size, of another content.

    Args:
        folder: of the checkpoint.
        part: this process reads every `num_parts`-th file; all look at sizes.
        num_parts: how many processes share the reading.
        with_checksums: read contents, if the checkpoint has checksums.
    """
    try:
        listed = json.loads((folder / LIST).read_text())
    except FileNotFoundError:
        return [f"{LIST} is missing: this is no complete checkpoint of jaxpar"]
    except (OSError, ValueError) as error:
        return [f"{LIST} cannot be read: {error}"]
    found = []
    for i, (name, (size, crc)) in enumerate(sorted(listed.items())):
        path = folder / name
        try:
            actual = path.stat().st_size
            if actual != size:
                found.append(f"{name} has {actual} bytes and was written with {size}")
            elif with_checksums and crc is not None and i % num_parts == part and checksum(path) != crc:
                found.append(f"{name} ({size} bytes) was changed since it was written: its checksum differs")
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror or error}")
    return found


def checksum(path: Path) -> int:
    """CRC-32 of a file, a piece at a time."""
    crc = 0
    with path.open("rb") as source:
        while piece := source.read(_CHUNK_BYTES):
            crc = zlib.crc32(piece, crc)
    return crc


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != LIST and path.relative_to(folder).name not in _LATER:
            yield path
