"""Files of the safetensors format, written as a stream: the package writes only what is in memory as a whole.

    model-00001-of-00002.safetensors     u64 length | JSON {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..} | bytes
    model-00002-of-00002.safetensors
    model.safetensors.index.json         {"metadata": {"total_size": 48}, "weight_map": {"a": "model-00001-of-00002.safetensors", ..}}

Each is written beside its place and renamed when all are complete; there is no index while files of two exports could mix.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpar._errors import CheckpointError
from jaxpar.checkpoint._tensors import Tensors, blocks, num_bytes

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CODES = {
    np.dtype(dtype): code
    for code, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "BF16": jnp.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
    }.items()
}
_TEMPORARY = ".tmp"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Args:
        name: in the file.
        shape: in the file.
        dtype: in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return num_bytes(self.shape, self.dtype)


class Named(Protocol):
    """An array that shall be written."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


def tensors_of(
    caller: str, arrays: Sequence[Named], rules: Sequence[Tensors], dtype: DTypeLike | None
) -> list[Tensor]:
    """What files hold of arrays.

    Args:
        caller: for messages.
        arrays: of a model.
        rules: of each, how it lies in files.
        dtype: of floating arrays there; None: their own.

    Raises:
        CheckpointError: two arrays would have one name, a rule does not fit, or the format has no such dtype.
    """
    found: list[Tensor] = []
    of: dict[str, str] = {}
    for array, rule in zip(arrays, rules, strict=True):
        is_cast = dtype is not None and jnp.issubdtype(array.dtype, jnp.floating)
        kind = dtype_of(caller, array.name, dtype if is_cast else array.dtype)
        for name, shape in rule.shapes(array.shape).items():
            if of.setdefault(name, array.name) != array.name:
                raise CheckpointError(
                    f"{caller}: {of[name]} and {array.name} would both be written as {name!r}. Correct `names`."
                )
            found.append(Tensor(name, shape, kind))
    return found


def dtype_of(caller: str, name: str, dtype: Any) -> np.dtype:
    """The dtype, which the format must know.

    Raises:
        CheckpointError: it does not.
    """
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or kind not in CODES:
        raise CheckpointError(
            f"{caller}: {name} is {dtype}, which is not written; dtypes are {[str(d) for d in CODES]}. "
            f"Write dtype=jnp.bfloat16, or leave it out with names={{{name!r}: None}}."
        )
    return kind


@dataclass(frozen=True)
class Export:
    """What goes into which file.

    Args:
        files: tensors by the name of their file, in the order in which they are written.
    """

    files: Mapping[str, Sequence[Tensor]]

    @classmethod
    def of(cls, tensors: Iterable[Tensor], max_shard_bytes: int) -> "Export":
        """Fills one file after the other; a tensor is never cut."""
        shards: list[list[Tensor]] = [[]]
        for tensor in tensors:
            if shards[-1] and sum(t.num_bytes for t in shards[-1]) + tensor.num_bytes > max_shard_bytes:
                shards.append([])
            shards[-1].append(tensor)
        if len(shards) == 1:
            return cls({SINGLE: shards[0]})
        return cls(
            {f"model-{i:05}-of-{len(shards):05}.safetensors": s for i, s in enumerate(shards, start=1)}
        )

    def write(self, folder: Path, values: Iterable[np.ndarray], budget_bytes: int) -> None:
        """Writes all files, then gives them their names; an export that was there before is replaced.

        Args:
            folder: made if it is not there.
            values: the tensors in order: views of any layout, whose elements in order are the tensor's.
            budget_bytes: what is copied, cast and written at once.
        """
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(folder)  # of an export that was killed
        stream = iter(values)
        paths = [folder / (name + _TEMPORARY) for name in self.files]
        try:
            for path, tensors in zip(paths, self.files.values(), strict=True):
                with _durable(path) as out:
                    _write_file(out, tensors, stream, budget_bytes)
            self._commit(folder, paths)
        except BaseException:
            _remove_unfinished(folder)
            raise

    def _commit(self, folder: Path, paths: Sequence[Path]) -> None:
        """At no moment is there an index beside files that are not its own."""
        index = folder / INDEX
        new_index = folder / (INDEX + _TEMPORARY)
        is_single = list(self.files) == [SINGLE]
        if not is_single:
            index.unlink(missing_ok=True)
            with _durable(new_index) as out:
                out.write(self._index())
        for path in paths:
            path.rename(path.with_suffix(""))
        if is_single:
            index.unlink(missing_ok=True)
        else:
            new_index.rename(index)
        for old in [*folder.glob("model-*-of-*.safetensors"), folder / SINGLE]:
            if old.name not in self.files:
                old.unlink(missing_ok=True)
        _sync(folder)

    def _index(self) -> bytes:
        total = sum(t.num_bytes for tensors in self.files.values() for t in tensors)
        where = {t.name: file for file, tensors in self.files.items() for t in tensors}
        found = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        return json.dumps(found, indent=2).encode() + b"\n"


def _write_file(
    out: IO[bytes], tensors: Sequence[Tensor], values: Iterator[np.ndarray], budget_bytes: int
) -> None:
    out.write(_header(tensors))
    for tensor in tensors:
        _write_tensor(out, next(values), tensor.dtype, budget_bytes)


def _write_tensor(out: IO[bytes], view: np.ndarray, dtype: np.dtype, budget_bytes: int) -> None:
    for part in blocks(view, budget_bytes):
        out.write(np.ascontiguousarray(part, dtype=dtype).reshape(-1).view(np.uint8).data)


def _header(tensors: Sequence[Tensor]) -> bytes:
    found: dict[str, object] = {"__metadata__": {"format": "pt"}}  # without it, transformers refuses the file
    at = 0
    for t in tensors:
        end = at + t.num_bytes
        found[t.name] = {"dtype": CODES[t.dtype], "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _remove_unfinished(folder: Path) -> None:
    for pattern in (f"model*.safetensors{_TEMPORARY}", INDEX + _TEMPORARY):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


class _durable:
    """A file that is on the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._out = path.open("wb")

    def __enter__(self) -> IO[bytes]:
        return self._out

    def __exit__(self, *failure: object) -> None:
        try:
            if failure[0] is None:
                self._out.flush()
                os.fsync(self._out.fileno())
        finally:
            self._out.close()


def _sync(folder: Path) -> None:
    """Makes renames durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
