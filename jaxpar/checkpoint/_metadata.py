"""What a folder of checkpoints holds, read without devices, without a model and without jax's backend."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar._errors import CheckpointError
from jaxpar.checkpoint._contents import read_contents
from jaxpar.checkpoint._files import complete_steps, faults, local

_BITS = {"bool": 8, "bfloat16": 16}


@dataclasses.dataclass(frozen=True)
class ArrayMetadata:
    """One array of a checkpoint.

    Args:
        shape: as the model has it, whatever the layout.
        dtype: its name.
        layout: how it lay when it was saved: its spec, as `P('dp', None)`, or "host".
        key: the kind of random keys, if it holds such: shape and dtype are those of their data.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: str
    key: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * _num_bytes(self.dtype)


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """One checkpoint of a folder.

    Args:
        step: of the checkpoint.
        arrays: by group (`model`, `optimizer`, `extra`) and dotted name.
        data_state: as it was given to `save`.
        extra: the values that are not modules.
        metrics: as they were given to `save`.
        num_processes: that wrote it.
        num_devices: of all of them.
        saved_at: UTC, ISO 8601.
        jaxpar: the version that wrote it.
    """

    step: int
    arrays: Mapping[str, Mapping[str, ArrayMetadata]]
    data_state: Any
    extra: Mapping[str, Any]
    metrics: Mapping[str, float]
    num_processes: int
    num_devices: int
    saved_at: str
    jaxpar: str


def steps(folder: str | Path) -> list[int]:
    """The steps whose checkpoints are complete, in order.

    Raises:
        CheckpointError: there is no such folder.

    Example:
        >>> import tempfile
        >>> from jaxpar.checkpoint import steps
        >>> steps(tempfile.mkdtemp())
        []
    """
    try:
        return complete_steps(local(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}.") from error


def metadata(folder: str | Path, step: int | None = None) -> CheckpointMetadata:
    """Names, shapes and dtypes of the arrays of a checkpoint, and what was saved beside them; no array is read (row K8).

    Args:
        folder: that was given to `CheckpointManager`.
        step: which checkpoint; None: the latest.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from jaxpar.checkpoint import CheckpointManager, metadata
        >>> folder = tempfile.mkdtemp()
        >>> with CheckpointManager(folder) as manager:
        ...     manager.save(3, nnx.Linear(4, 2, rngs=nnx.Rngs(0)), data_state={"epoch": 1})
        True
        >>> found = metadata(folder)
        >>> found.step, found.data_state, found.arrays["model"]["kernel"].shape
        (3, {'epoch': 1}, (4, 2))
    """
    there = steps(folder)
    if not there or (step is not None and step not in there):
        wanted = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        raise CheckpointError(f"{folder} does not have {wanted}; it has those of the steps {there}.")
    found = read_contents(local(folder) / str(there[-1] if step is None else step))
    arrays = {
        group: {
            name: ArrayMetadata(tuple(x["shape"]), x["dtype"], x["layout"], x.get("key"))
            for name, x in named.items()
        }
        for group, named in found["arrays"].items()
    }
    names = [field.name for field in dataclasses.fields(CheckpointMetadata) if field.name != "arrays"]
    return CheckpointMetadata(arrays=arrays, **{name: found[name] for name in names})


def verify(folder: str | Path, step: int | None = None) -> list[str]:
    """Compares sizes and checksums of a checkpoint's files with what was written; an empty list says that all is well.

    Args:
        folder: that was given to `CheckpointManager`.
        step: which checkpoint; None: the latest.

    Raises:
        CheckpointError: there is no such checkpoint.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from jaxpar.checkpoint import CheckpointManager, verify
        >>> folder = tempfile.mkdtemp()
        >>> with CheckpointManager(folder) as manager:
        ...     manager.save(3, nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
        True
        >>> verify(folder)
        []
    """
    return faults(local(folder) / str(metadata(folder, step).step))


def _num_bytes(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype] // 8
    digits = "".join(c for c in dtype.partition("_")[0].removeprefix("float8") if c.isdigit())
    return 1 if dtype.startswith("float8") else math.ceil(int(digits or 8) / 8)
