"""Full state: whole arrays on the host by dotted name, whatever the layout on the devices.

device 0: [w 0:2]  device 1: [w 2:4]    --full_state-->       {"w": [w 0:4]}
device 0: [w 0:2]  device 1: [w 2:4]    <--load_full_state--  {"w": [w 0:4]}      each process puts its own pieces
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxpar._errors import ParallelizeError
from jaxpar.fsdp._named import NamedArray, check_no_bare_arrays, dtype_of, named_arrays
from jaxpar.fsdp._pieces import Reading, needs_gather, read, read_all
from jaxpar.fsdp._record import is_flat
from jaxpar.mesh import assert_same_everywhere, get_rank, warm_up

DEFAULT_BUDGET_BYTES = 256 * 1024 * 1024


def full_state(
    module: nnx.Module | nnx.Optimizer,
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    rank0_only: bool = False,
) -> dict[str, np.ndarray]:
    """Returns all variables of a model or an optimizer as host arrays by dotted name (PyTorch's full state dict, K4).

    What moves: nothing between devices if this process can read all parts. An array over several processes is
    all-gathered over the axes that split it, a slice at a time. All processes must call then, in one order.

    Args:
        module: a model or `nnx.Optimizer`, in any layout.
        budget_bytes: what gathered slices take on a device, and what is on its way to the host, at once; at least one
            slice (one device's part of an array that is read without a gather) always travels.
        rank0_only: the other processes take part in the gathers, keep nothing and return an empty dict.

    Returns:
        Arrays of the process' own: `{"blocks.0.kernel": f32[D, F], ...}`, each variable once. Shapes are those that
        the model was built with (padding never appears; `opt_state.0.mu.*` have their parameters' shapes), dtypes
        those stored. A random key is its data (`u32[2]` for the default kind).

    Raises:
        ParallelizeError: `budget_bytes` is not positive, or an array lies outside a variable.
        DesyncError: the processes ask for different things.
        ProcessGroupError: a gather is needed, and some processes did not come to it in time.

    Example:
        >>> from flax import nnx
        >>> from jaxpar.fsdp import full_state, fully_shard
        >>> from jaxpar.mesh import init_device_mesh
        >>> model = fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), init_device_mesh((8,), ("dp",)))
        >>> {name: x.shape for name, x in full_state(model).items()}
        {'bias': (8,), 'kernel': (16, 8)}
    """
    return dict(iter_full_state(module, budget_bytes=budget_bytes, rank0_only=rank0_only))


def iter_full_state(
    module: nnx.Module | nnx.Optimizer,
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    rank0_only: bool = False,
) -> Iterator[tuple[str, np.ndarray]]:
    """`full_state` as a stream, to write array by array: see there. Every process must run it to its end."""
    if budget_bytes < 1:
        raise ParallelizeError(
            f"full_state: budget_bytes={budget_bytes} lets nothing through. Write the bytes that may be gathered on a device "
            f"at once, such as budget_bytes=2**28, or leave it out."
        )
    check_no_bare_arrays(module)
    arrays = named_arrays(module)
    abstract = [a.name for a in arrays if isinstance(a.value, jax.ShapeDtypeStruct)]
    if abstract:
        raise ParallelizeError(
            f"full_state: {abstract} of {type(module).__name__} have shapes but no values yet. Build the model with "
            f"jaxpar.init_sharded(model_fn, parallelize), or fill it with load_full_state(model, state)."
        )
    if any(needs_gather(a.value) for a in arrays):
        _agree(arrays, budget_bytes, rank0_only=rank0_only)
    return _stream(arrays, budget_bytes, keep=not rank0_only or get_rank() == 0)


def load_full_state(
    module: nnx.Module | nnx.Optimizer, state: Mapping[str, Any], *, strict: bool = True
) -> tuple[str, ...]:
    """Puts the arrays of `full_state` into a model or an optimizer, in place, in the layout that it has now.

    Nothing moves between devices: each process puts the pieces that its own devices hold. The layout may differ from
    the one that was saved: another number of devices, another dim, padded or not; abstract variables
    (`jax.ShapeDtypeStruct`) become arrays where their shardings say.

    Args:
        module: a model or `nnx.Optimizer`. An optimizer follows its model: shard the model, build the optimizer, load both.
        state: host arrays by dotted name, the same on every process; also a lazy mapping, such as `np.load("state.npz")`.
            Shapes and dtypes must be the variables' own; nothing is cast or broadcast.
        strict: False leaves variables without an array in `state` as they are, and ignores names without a variable.

    Returns:
        The names of the variables that were left as they are; empty if `strict`.

    Raises:
        ParallelizeError: names, shapes or dtypes do not fit: all of them in one message, and nothing is changed.

    Example:
        >>> from flax import nnx
        >>> from jaxpar.fsdp import full_state, fully_shard, load_full_state
        >>> from jaxpar.mesh import init_device_mesh
        >>> state = full_state(nnx.Linear(16, 8, rngs=nnx.Rngs(0)))
        >>> model = fully_shard(nnx.Linear(16, 8, rngs=nnx.Rngs(1)), init_device_mesh((8,), ("dp",)))
        >>> load_full_state(model, state)
        ()
        >>> bool((model.kernel[...] == state["kernel"]).all())
        True
    """
    check_no_bare_arrays(module)
    arrays = named_arrays(module)
    faults = _faults(arrays, state, strict=strict)
    if faults:
        lines = "".join(f"\n    {fault}" for fault in faults)
        raise ParallelizeError(
            f"load_full_state: {len(faults)} names do not fit {type(module).__name__}; nothing was loaded:{lines}\n"
            f"Names are dotted paths of variables, shapes those without padding, as full_state gives them; dtypes must match. "
            f"strict=False skips missing and unexpected names."
        )
    present = [array for array in arrays if array.name in state]
    for array in present:
        array.assign(_placed(array, np.asarray(state[array.name])))
    return tuple(array.name for array in arrays if array.name not in state)


# Reading.


def _agree(arrays: list[NamedArray], budget_bytes: int, *, rank0_only: bool) -> None:
    """Every process must gather the same arrays in the same pieces, and be here."""
    names = "\n".join(
        f"{a.name} {a.dtype}{list(a.shape)} {getattr(a.value, 'sharding', None)}"
        for a in arrays
        if needs_gather(a.value)
    )
    facts = {
        "arrays": hashlib.sha256(names.encode()).hexdigest(),
        "options": f"{budget_bytes=}, {rank0_only=}",
    }
    assert_same_everywhere("full_state", facts)
    for mesh in dict.fromkeys(a.value.sharding.mesh for a in arrays if needs_gather(a.value)):
        warm_up(mesh)


def _stream(arrays: list[NamedArray], budget_bytes: int, *, keep: bool) -> Iterator[tuple[str, np.ndarray]]:
    readings = (_reading(array, budget_bytes, keep=keep) for array in arrays)
    for array, host in zip(arrays, read_all(readings, budget_bytes), strict=True):
        if host is not None:
            yield array.name, host.reshape(-1)[: _size(array)].reshape(array.shape)


def _reading(array: NamedArray, budget_bytes: int, *, keep: bool) -> Reading:
    x = jax.random.key_data(array.value) if array.is_key else array.value
    if isinstance(x, jax.Array):
        return read(x, budget_bytes=budget_bytes, keep=keep)
    host = np.array(x) if keep else None
    return Reading((), lambda: host)


def _size(array: NamedArray) -> int:
    return int(np.prod(array.shape, dtype=np.int64))


# Loading.


def _faults(arrays: list[NamedArray], state: Mapping[str, Any], *, strict: bool) -> list[str]:
    faults = []
    for array in arrays:
        if array.name not in state:
            if strict:
                faults.append(f"{array.name}: missing from the state ({array.dtype}{list(array.shape)})")
            continue
        given = state[array.name]
        shape, dtype = np.shape(given), dtype_of(given)
        if tuple(shape) != array.shape:
            faults.append(f"{array.name}: shape {list(shape)} in the state, {list(array.shape)} here")
        if dtype != array.dtype:
            faults.append(
                f"{array.name}: dtype {dtype} in the state, {array.dtype} here; cast it with .astype if that is meant"
            )
    if strict:
        known = {array.name for array in arrays}
        faults += [f"{name}: unexpected, no variable has this name" for name in state if name not in known]
    return faults


def _placed(array: NamedArray, host: np.ndarray) -> Any:
    """The array as the variable stores it now: padded, sharded, in its memory; a copy."""
    old = array.value
    if not isinstance(old, jax.Array | jax.ShapeDtypeStruct):
        return host.copy() if isinstance(old, np.ndarray) else host.item()
    if is_flat(array.variable):
        host = np.pad(host.reshape(-1), (0, old.shape[0] - host.size))
    x = _put(host, old)
    return jax.random.wrap_key_data(x, impl=_key_impl(old)) if array.is_key else x


def _put(host: np.ndarray, old: Any) -> jax.Array:
    is_placed = isinstance(old.sharding, NamedSharding) or getattr(old, "committed", False)
    if not is_placed:
        return jax.numpy.array(host)
    # A copy of each piece: XLA:CPU may use NumPy's memory as it is, and a training step donates it.
    return jax.make_array_from_callback(host.shape, old.sharding, lambda index: np.array(host[index]))


def _key_impl(keys: Any) -> Any:
    impls = []
    jax.eval_shape(lambda k: impls.append(jax.random.key_impl(k)), keys)
    return impls[0]
