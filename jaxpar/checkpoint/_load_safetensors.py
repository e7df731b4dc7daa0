"""`load_safetensors`: weights from files into the layout that the model has, each process its own slices.

file: weight [8, 16]    -->    device 0: kernel [0:8]    device 1: kernel [8:16]      nothing is read that no device here needs
"""

import collections
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxpar._as_stored import as_stored
from jaxpar._errors import CheckpointError
from jaxpar._named import NamedArray
from jaxpar._record import is_flat
from jaxpar.checkpoint._files import local
from jaxpar.checkpoint._safetensors_read import TensorFiles
from jaxpar.checkpoint._save_safetensors import arrays_with_rules
from jaxpar.checkpoint._tensors import Index, Names, Tensors, whole

ReadPart = Callable[[Index], np.ndarray]


def load_safetensors(
    model: nnx.Module,
    folder: str | Path,
    *,
    names: Names | None = None,
    cast: bool = False,
    strict: bool = True,
) -> tuple[str, ...]:
    """Puts the weights of safetensors files into a model, in place, in the layout that it has now (row K9).

    Nothing moves between devices: each process reads the slices that its own devices hold, one array after the other. Abstract
    variables (`jax.ShapeDtypeStruct`) become arrays where their shardings say; pipelines over processes are fine.

    Args:
        model: in any layout, abstract or not.
        folder: as `save_safetensors`, or `save_pretrained` of transformers, wrote it; or one file.
        names: as in `save_safetensors`.
        cast: True converts floating tensors to the dtypes that the variables have; False: another dtype is an error.
        strict: False leaves variables without a tensor as they are, and ignores tensors without a variable.

    Returns:
        The names of the variables that were left as they are; empty if `strict`.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit: all of them in one message, and nothing is changed; a file is
            missing or damaged; or the package safetensors is not installed (`pip install 'jaxpar[hf]'`).

    Example:
        >>> import tempfile, jaxpar
        >>> from flax import nnx
        >>> from jaxpar.checkpoint import load_safetensors, save_safetensors
        >>> model, folder = nnx.Linear(16, 8, rngs=nnx.Rngs(0)), tempfile.mkdtemp()
        >>> save_safetensors(model, folder)
        >>> mesh = jaxpar.init_device_mesh((8,), ("dp",))
        >>> other = jaxpar.fsdp.fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(1)), mesh)
        >>> load_safetensors(other, folder), bool((other.kernel[...] == model.kernel[...]).all())
        ((), True)
    """
    arrays, rules = arrays_with_rules(model, names)
    with TensorFiles.open(local(folder)) as files:
        faults = _faults(arrays, rules, files, cast=cast, strict=strict)
        if faults:
            raise CheckpointError(
                f"load_safetensors: {len(faults)} tensors of {folder} do not fit {type(model).__name__}; nothing was loaded:"
                + "".join(f"\n    {fault}" for fault in faults)
                + "\nSay with names= how arrays are called and laid out there; cast=True converts floating dtypes; strict=False skips "
                "missing and unexpected names."
            )
        left, waiting = [], collections.deque(zip(arrays, rules, strict=True))
        del arrays, rules  # with them the old values go, one by one
        while waiting:
            array, rule = waiting.popleft()
            if all(name in files.slices for name in rule.tensors):
                array.assign(
                    jax.block_until_ready(_loaded(array, rule, files))
                )  # one at a time in host memory
            else:
                left.append(array.name)
    return tuple(left)


def _faults(
    arrays: Sequence[NamedArray], rules: Sequence[Tensors], files: TensorFiles, *, cast: bool, strict: bool
) -> list[str]:
    found, known = [], set()
    for array, rule in zip(arrays, rules, strict=True):
        for name, shape in rule.shapes(array.shape).items():
            known.add(name)
            label = array.name if name == array.name else f"{array.name} (tensor {name})"
            if name not in files.slices:
                if strict:
                    found.append(f"{label}: missing from the files ({array.dtype}{list(shape)})")
                continue
            there, dtype = files.shape(name), files.dtype(name)
            if there != shape:
                found.append(f"{label}: shape {list(there)} in the files, {list(shape)} expected")
            if dtype != array.dtype and not (cast and _is_floating(dtype) and _is_floating(array.dtype)):
                found.append(f"{label}: dtype {dtype} in the files, {array.dtype} here")
    if strict:
        found += [
            f"{name}: unexpected, no variable is made of it" for name in files.slices if name not in known
        ]
    return found


def _is_floating(dtype: np.dtype | str) -> bool:
    return not isinstance(dtype, str) and jnp.issubdtype(dtype, jnp.floating)


def _loaded(array: NamedArray, rule: Tensors, files: TensorFiles) -> Any:
    """The array as the variable stores it."""

    def read(index: Index) -> np.ndarray:
        return rule.read(array.shape, index, files.read, array.dtype)

    old = array.value
    if not isinstance(getattr(old, "sharding", None), NamedSharding):
        return as_stored(array, read(whole(array.shape)))
    if not old.sharding.addressable_devices:  # of another stage of a pipeline
        return jax.make_array_from_single_device_arrays(old.shape, old.sharding, [], dtype=old.dtype)
    part = _flat_part(array.shape, read) if is_flat(array.variable) else read
    return jax.make_array_from_callback(old.shape, old.sharding, _once(old.shape, part))


def _once(shape: Sequence[int], read: ReadPart) -> Callable[[Any], np.ndarray]:
    """Reads a part once for all devices that hold it, a copy for each: XLA:CPU may use NumPy's memory as it is."""
    seen: dict[Any, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        at = tuple(slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=True))
        key = tuple((s.start, s.stop) for s in at)
        return seen[key].copy() if key in seen else seen.setdefault(key, read(at))

    return part


def _flat_part(shape: Sequence[int], read: ReadPart) -> ReadPart:
    """Parts of the array as one padded dim: of the rows that hold the elements."""
    size, row = math.prod(shape), math.prod(shape[1:])

    def part(index: Index) -> np.ndarray:
        start, stop = min(index[0].start, size), min(index[0].stop, size)
        rows = slice(start // row, -(-stop // row)) if size else slice(0, 0)
        at = (rows, *whole(shape[1:])) if shape else ()
        found = read(at).reshape(-1)[start - rows.start * row : stop - rows.start * row]
        return np.pad(found, (0, index[0].stop - index[0].start - len(found)))

    return part
