"""The arrays of what is saved, in groups: model, optimizer, extra; described for the file, and compared with what it says."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from jaxpar._errors import CheckpointError
from jaxpar._named import NamedArray, check_no_bare_arrays, named_arrays
from jaxpar._record import is_flat
from jaxpar.checkpoint._arrays import is_abstract_without_place, key_kind, spec_text
from jaxpar.checkpoint._contents import difference_lines
from jaxpar.checkpoint._tensors import num_bytes

Groups = dict[str, list[NamedArray]]


def groups_of(model: nnx.Module, optimizer: nnx.Optimizer | None, extra: Mapping[str, nnx.Pytree]) -> Groups:
    """What `save` and `restore` are given, by group; names of extra modules begin with their own."""
    found: Groups = {"model": _arrays(model), "optimizer": [] if optimizer is None else _arrays(optimizer)}
    found["extra"] = [
        NamedArray(f"{name}.{array.name}", array.variable, array.value, array.position)
        for name, module in extra.items()
        for array in _arrays(module)
    ]
    return found


def _arrays(module: nnx.Pytree) -> list[NamedArray]:
    check_no_bare_arrays(module)
    return named_arrays(module)


def described(groups: Groups) -> dict[str, dict[str, dict[str, Any]]]:
    """What is written about the arrays: dtype, shape, layout, kind of random keys."""
    return {name: {array.name: _description(array) for array in arrays} for name, arrays in groups.items()}


def _description(array: NamedArray) -> dict[str, Any]:
    found: dict[str, Any] = {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "layout": spec_text(array),
    }
    kind = key_kind(array)
    return found if kind is None else found | {"key": kind}


def split_extra(extra: Mapping[str, Any] | None) -> tuple[dict[str, nnx.Pytree], dict[str, Any]]:
    """`extra` as modules and as values for JSON."""
    modules = {name: x for name, x in (extra or {}).items() if isinstance(x, nnx.Pytree)}
    return modules, {name: x for name, x in (extra or {}).items() if name not in modules}


def check_values(groups: Groups) -> None:
    """Raises CheckpointError if an array has no values to save."""
    abstract = [
        f"{name}: {array.name}"
        for name, arrays in groups.items()
        for array in arrays
        if isinstance(array.value, jax.ShapeDtypeStruct)
    ]
    if abstract:
        raise CheckpointError(
            f"CheckpointManager.save: {len(abstract)} variables have shapes but no values yet, first {abstract[0]}. Build the "
            f"model with jaxpar.init_sharded(model_fn, parallelize), or restore it first."
        )


def check_places(groups: Groups) -> None:
    """Raises CheckpointError if it is not known where an array would go."""
    lost = [
        f"{name}: {array.name}"
        for name, arrays in groups.items()
        for array in arrays
        if is_abstract_without_place(array)
    ]
    if lost:
        raise CheckpointError(
            f"CheckpointManager.restore: {len(lost)} variables have a shape and no sharding, first {lost[0]}: where should they "
            f"go? Parallelise the model first (jaxpar.fsdp.fully_shard, jaxpar.init_sharded), or build it with values."
        )


def check_fits(path: Path, about: Mapping[str, Any], groups: Groups, *, strict: bool) -> None:
    """Raises CheckpointError with all differences between a checkpoint and what shall be filled."""
    lines: list[str] = []
    for name, arrays in described(groups).items():
        saved = about["arrays"].get(name, {})
        if name == "model" or arrays:  # an optimizer or extra that nobody asked for stays on the disk
            lines += [f"{name}: {line}" for line in difference_lines(saved, arrays, strict=strict)]
    if lines:
        raise CheckpointError(
            f"{path} does not fit the model: {len(lines)} differences; nothing was changed:"
            + "".join(f"\n    {line}" for line in lines)
            + "\nNames are dotted paths of variables, shapes those that the model was built with. strict=False skips missing names; "
            "shapes and dtypes must be equal."
        )


def in_batches(groups: Groups, max_bytes: int) -> Iterator[Groups]:
    """Arrays that take so many bytes together in every process, or one that is larger; the same batches on all processes."""
    batch: Groups = {}
    size = 0
    for name, arrays in groups.items():
        for array in arrays:
            own = _process_bytes(array)
            if batch and size + own > max_bytes:
                yield batch
                batch, size = {}, 0
            batch.setdefault(name, []).append(array)
            size += own
    if batch:
        yield batch


def _process_bytes(array: NamedArray) -> int:
    """What the process with most devices of an array takes for it."""
    sharding = getattr(array.value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or is_flat(array.variable):
        return num_bytes(array.shape, array.dtype)
    of_process = collections.Counter(device.process_index for device in sharding.device_set)
    return max(of_process.values()) * num_bytes(sharding.shard_shape(array.value.shape), array.dtype)


def given_up(array: NamedArray) -> NamedArray:
    """The same without the values, to be read anew; its variable keeps shape and place."""
    x = array.value
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return array
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    array.assign(shape)
    return dataclasses.replace(array, value=shape)
