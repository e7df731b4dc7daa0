"""`load_full_state`: host arrays by dotted name into whatever layout the variables have now.

{"w": [w 0:4]}    -->    device 0: [w 0:2]  device 1: [w 2:4]      each process puts its own pieces; nothing travels
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from jaxpar._as_stored import as_stored
from jaxpar._errors import ParallelizeError
from jaxpar._named import NamedArray, check_no_bare_arrays, dtype_of, named_arrays


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
        array.assign(as_stored(array, np.asarray(state[array.name])))
    return tuple(array.name for array in arrays if array.name not in state)


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
