"""`save_safetensors`: the weights of a model as files that others read, written while they are gathered.

device 0: [w 0:2]  device 1: [w 2:4]   --one array at a time-->   model-00001-of-00003.safetensors, ..  (rank 0)
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxpar._errors import CheckpointError
from jaxpar._named import NamedArray, check_no_bare_arrays, named_arrays
from jaxpar.checkpoint._files import local
from jaxpar.checkpoint._safetensors_write import Export, tensors_of
from jaxpar.checkpoint._tensors import Names, Tensors, rule_of
from jaxpar.mesh import broadcast_object, get_rank
from jaxpar.mesh._host_arrays import DEFAULT_BUDGET_BYTES, Asker, host_arrays


def save_safetensors(
    model: nnx.Module,
    folder: str | Path,
    *,
    names: Names | None = None,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = 5 * 10**9,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> None:
    """Writes the weights of a model as safetensors files, laid out as Hugging Face does (row K9).

    What moves: arrays that lie on several processes are all-gathered, a slice at a time; rank 0 writes. All processes call it
    together. Host memory: the array that is being written and the next one, which is on its way, and `budget_bytes` for what is
    cast. Random keys are no weights and are left out.

    The folder has `model.safetensors`, or `model-00001-of-00003.safetensors`, .. and `model.safetensors.index.json`. Files are
    written beside their places and renamed when all are complete; an export that was there is replaced, other files stay.

    Args:
        model: in any layout. A pipeline over processes: inside `jaxpar.pp.gathered(model, mesh)`.
        folder: made if it is not there.
        names: how the arrays are called and laid out there, by their names here: a function or a mapping to a name, `Tensors`
            (transposed, split into several) or None (left out). A name that a mapping does not have stays.
        dtype: what floating arrays are rounded to, such as `jnp.bfloat16`; None: as they are.
        max_shard_bytes: a file is not larger, unless one tensor is.
        budget_bytes: what travels or is cast at once.

    Raises:
        CheckpointError: two arrays would have one name, a rule does not fit, the format has no such dtype, arrays are
            abstract or of other processes' stages, or, on every process, the files cannot be written.
        DesyncError: the processes have different models or options.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from jaxpar.checkpoint import Tensors, load_safetensors, save_safetensors
        >>> model, folder = nnx.Linear(16, 8, rngs=nnx.Rngs(0)), tempfile.mkdtemp()
        >>> names = {"kernel": Tensors("weight", permute=(1, 0))}  # as torch.nn.Linear has it
        >>> save_safetensors(model, folder, names=names)
        >>> load_safetensors(model, folder, names=names)
        ()
    """
    if max_shard_bytes < 1:
        raise CheckpointError(
            f"save_safetensors: max_shard_bytes={max_shard_bytes} holds nothing. Write such as 5 * 10**9, or leave it out."
        )
    arrays, rules = arrays_with_rules(model, names)
    tensors = tensors_of("save_safetensors", arrays, rules, dtype)
    asker = Asker(
        name="save_safetensors",
        owner=type(model).__name__,
        error=CheckpointError,
        call="save_safetensors(model, folder)",
        filled_by="load_safetensors(model, folder)",
    )
    stream = host_arrays(arrays, asker, budget_bytes=budget_bytes, rank0_only=True)
    failure = _write(Export.of(tensors, max_shard_bytes), local(folder), _views(stream, rules), budget_bytes)
    said = broadcast_object("" if failure is None else f"{type(failure).__name__}: {failure}")
    if said:
        raise CheckpointError(
            f"save_safetensors: {folder} could not be written ({said}). What was there before is as it was, or has no index."
        ) from failure


def arrays_with_rules(model: nnx.Module, names: Names | None) -> tuple[list[NamedArray], list[Tensors]]:
    """The weights of a model that files have, and how."""
    check_no_bare_arrays(model)
    weights = [
        (array, rule_of(names, array.name))
        for array in named_arrays(model)
        if not (array.is_key or isinstance(array.variable, nnx.RngState))
    ]
    there = [(array, rule) for array, rule in weights if rule is not None]
    return [array for array, _ in there], [rule for _, rule in there]


def _views(stream: Iterator[tuple[str, np.ndarray]], rules: Sequence[Tensors]) -> Iterator[np.ndarray]:
    for rule in rules:
        entry = next(stream, None)  # nothing on the processes that do not write
        if entry is not None:
            yield from rule.views(entry[1])
        del entry  # or it would stay while the next but one is read


def _write(export: Export, folder: Path, values: Iterator[np.ndarray], budget_bytes: int) -> Exception | None:
    """What went wrong, on rank 0; whatever it is, this process goes through all gathers: the others do."""
    failure = None
    if get_rank() == 0:
        try:
            export.write(folder, values, budget_bytes)
        except OSError as error:
            failure = error
    for _ in values:
        pass
    return failure
