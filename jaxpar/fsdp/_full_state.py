"""`full_state`: whole arrays on the host by dotted name, whatever the layout on the devices.

device 0: [w 0:2]  device 1: [w 2:4]    --full_state-->       {"w": [w 0:4]}
                                        <--load_full_state--  the inverse, `_load_full_state.py`
"""

from collections.abc import Iterator

import numpy as np
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._named import check_no_bare_arrays, named_arrays
from jaxpar.mesh._host_arrays import DEFAULT_BUDGET_BYTES, Asker, host_arrays


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
    check_no_bare_arrays(module)
    asker = Asker(
        name="full_state",
        owner=type(module).__name__,
        error=ParallelizeError,
        call="state = full_state(model)",
        filled_by="load_full_state(model, state)",
    )
    return host_arrays(named_arrays(module), asker, budget_bytes=budget_bytes, rank0_only=rank0_only)
