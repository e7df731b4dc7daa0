"""Between checkpoints and safetensors files without the model: for those who have only the files.

    runs/a/400/model   Orbax, OCDBT   -- a few arrays at a time -->   model-00001-of-00003.safetensors, ..
    weights/*.safetensors             -- all of them -->              runs/b/0/model

Sources: PyTorch's `dcp_to_torch_save` and `torch_save_to_dcp` (row K10).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from jax.typing import DTypeLike

from jaxpar._errors import CheckpointError
from jaxpar.checkpoint._contents import contents
from jaxpar.checkpoint._files import faults, local
from jaxpar.checkpoint._metadata import ArrayMetadata, metadata, steps
from jaxpar.checkpoint._safetensors_read import TensorFiles
from jaxpar.checkpoint._safetensors_write import Export, dtype_of, tensors_of
from jaxpar.checkpoint._store import GROUPS, Store
from jaxpar.checkpoint._tensors import Names, Tensors, num_bytes, rule_of, whole
from jaxpar.mesh._host_arrays import DEFAULT_BUDGET_BYTES


@dataclass(frozen=True)
class _Stored:
    """An array of a checkpoint: what `tensors_of` wants to know."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


def checkpoint_to_safetensors(
    checkpoints: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    group: str = "model",
    names: Names | None = None,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = 5 * 10**9,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> None:
    """Writes the arrays of a checkpoint as safetensors files: no model and no device is needed (row K10).

    One process calls it, on any machine that sees the folder. Host memory: arrays of `budget_bytes` together, or one that is larger.
    Random keys and their counts are left out. The files are those of `save_safetensors`, under the model's names.

    Args:
        checkpoints: the folder that was given to `CheckpointManager`.
        folder: made if it is not there; an export that was there is replaced.
        step: which checkpoint; None: the latest.
        group: `model`, `optimizer` or `extra`.
        names: as for `save_safetensors`.
        dtype: what floating arrays are rounded to; None: as they are.
        max_shard_bytes: a file is not larger, unless one tensor is.
        budget_bytes: what is read and cast at once.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, a rule does not fit, or the files cannot be written.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from jaxpar.checkpoint import CheckpointManager, checkpoint_to_safetensors, load_safetensors
        >>> model, run, out = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> with CheckpointManager(run) as manager:
        ...     manager.save(3, model)
        True
        >>> checkpoint_to_safetensors(run, out)
        >>> load_safetensors(model, out)
        ()
    """
    found = metadata(checkpoints, step)
    path = local(checkpoints) / str(found.step)
    if damage := faults(path):
        raise CheckpointError(
            f"{path} is damaged: {'; '.join(damage)}. Name another step: there are {steps(checkpoints)}."
        )
    arrays, rules = _chosen(path, found.arrays, group, names)
    tensors = tensors_of("checkpoint_to_safetensors", arrays, rules, dtype)
    export = Export.of(tensors, max_shard_bytes)
    values = _views(_read(path / group, arrays, budget_bytes), rules)
    try:
        export.write(local(folder), values, budget_bytes)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint_to_safetensors: {folder} could not be written ({error}). What was there before is as it was, or has no index."
        ) from error


def safetensors_to_checkpoint(path: str | Path, checkpoints: str | Path, *, step: int = 0) -> None:
    """Writes the tensors of safetensors files as the model of a checkpoint, from which any layout restores (row K10).

    One process calls it; all tensors are in its memory. Names are those in the files: with others, `load_safetensors(model, names=)`
    and `CheckpointManager.save`.

    Args:
        path: a folder with an index or a single file, or one file.
        checkpoints: the folder that will be given to `CheckpointManager`; made if it is not there.
        step: of the checkpoint.

    Raises:
        CheckpointError: the files cannot be read, the folder has that step, or the checkpoint cannot be written.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from jaxpar.checkpoint import CheckpointManager, safetensors_to_checkpoint, save_safetensors
        >>> model, out, run = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> save_safetensors(model, out)
        >>> safetensors_to_checkpoint(out, run)
        >>> with CheckpointManager(run) as manager:
        ...     manager.restore(model).step
        0
    """
    with TensorFiles.open(local(path)) as files:
        arrays = {}
        for name in files.slices:
            dtype_of("safetensors_to_checkpoint", name, files.dtype(name))
            arrays[name] = np.array(files.read(name, whole(files.shape(name))))
    described = {
        name: {"dtype": str(x.dtype), "shape": list(x.shape), "layout": "host"} for name, x in arrays.items()
    }
    groups = dict.fromkeys(GROUPS, {}) | {"model": described}
    about = contents(step, groups, data_state=None, extra={}, metrics={}, num_processes=1, num_devices=0)
    store = Store(local(checkpoints))
    try:
        if step in store.steps():
            raise CheckpointError(
                f"{checkpoints} has a checkpoint of step {step} already. Name another step, or another folder."
            )
        store.save(step, {"model": arrays}, about, {})
    finally:
        store.close()


def _chosen(
    path: Path, found: Mapping[str, Mapping[str, ArrayMetadata]], group: str, names: Names | None
) -> tuple[list[_Stored], list[Tensors]]:
    """The arrays of a group that files get, and how."""
    if not found.get(group):
        there = [name for name, arrays in found.items() if arrays]
        raise CheckpointError(f"{path} has no arrays in group {group!r}; it has {there}.")
    arrays, rules = [], []
    streams = {name.removesuffix("key") for name, x in found[group].items() if x.key is not None}
    counts = {f"{stream}count" for stream in streams}
    for name, x in found[group].items():
        rule = rule_of(names, name)
        if x.key is None and name not in counts and rule is not None:
            arrays.append(_Stored(name, x.shape, dtype_of("checkpoint_to_safetensors", name, x.dtype)))
            rules.append(rule)
    return arrays, rules


def _read(path: Path, arrays: Sequence[_Stored], budget_bytes: int) -> Iterator[np.ndarray]:
    """The arrays in order, so many at once as the budget allows."""
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    try:
        for batch in _batches(arrays, budget_bytes):
            args: dict[str, Any] = {x.name: ocp.RestoreArgs(restore_type=np.ndarray) for x in batch}
            wanted = ocp.args.PyTreeRestore(
                item=dict.fromkeys(args, 0), restore_args=args, partial_restore=True
            )
            found = checkpointer.restore(path.absolute(), args=wanted)
            for x in batch:
                yield np.asarray(found.pop(x.name))
    finally:
        checkpointer.close()


def _batches(arrays: Sequence[_Stored], budget_bytes: int) -> Iterator[list[_Stored]]:
    batch: list[_Stored] = []
    size = 0
    for x in arrays:
        own = num_bytes(x.shape, x.dtype)
        if batch and size + own > budget_bytes:
            yield batch
            batch, size = [], 0
        batch.append(x)
        size += own
    if batch:
        yield batch


def _views(values: Iterator[np.ndarray], rules: Sequence[Tensors]) -> Iterator[np.ndarray]:
    for rule in rules:
        value = next(values)
        yield from rule.views(value)
        del value  # or it would stay while the next one is read
