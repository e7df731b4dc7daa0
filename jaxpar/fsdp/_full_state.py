"""`full_state`: whole arrays on the host by dotted name, whatever the layout on the devices.

device 0: [w 0:2]  device 1: [w 2:4]    --full_state-->       {"w": [w 0:4]}
                                        <--load_full_state--  the inverse, `_load_full_state.py`
"""

import hashlib
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._named import NamedArray, check_no_bare_arrays, named_arrays
from jaxpar.fsdp._pieces import needs_gather, read
from jaxpar.fsdp._stream import Reading, read_all
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
        ParallelizeError: `budget_bytes` is not positive, an array lies outside a variable, or on a stage of a pipeline of
            which this process has no device.
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
    away = [
        a.name for a in arrays if isinstance(a.value, jax.Array) and not a.value.sharding.addressable_devices
    ]
    if away:
        raise ParallelizeError(
            f"full_state: {away[0]} and {len(away) - 1} other arrays of {type(module).__name__} lie on the devices of other processes "
            f"only: they belong to other stages of a pipeline. Write, in every process, with jaxpar.pp.gathered(model, mesh): "
            f"state = full_state(model)."
        )
    if any(needs_gather(a.value) for a in arrays):
        _agree(arrays, budget_bytes, rank0_only=rank0_only)
    return _stream(arrays, budget_bytes, keep=not rank0_only or get_rank() == 0)


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
