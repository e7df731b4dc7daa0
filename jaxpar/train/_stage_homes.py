"""Variables that were assigned between steps, brought to the devices of the stage that owns them.

model.noise.set_value(jax.random.key(step))     on a device of its own, in every process
before the step                                 on all devices of its stage; from there to other stages that use it
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpar._errors import ParallelizeError
from jaxpar.pp._place import restricted

Leaves = list[Any]


class StageHomes:
    """Where parameters and other variables belong. An array that a step has made is not looked at again.

    Args:
        names: of the variables.
        values: what they hold, each on the stage that owns it.
    """

    def __init__(self, names: Sequence[str], values: Leaves) -> None:
        self._names, self._known = names, values
        self._shardings = [x.sharding for x in values]

    def know(self, values: Leaves) -> None:
        """Remember what the variables hold after a step."""
        self._known = list(values)

    def are_known(self, values: Leaves) -> bool:
        """Whether nobody has assigned anything since."""
        return all(map(operator.is_, values, self._known))

    def home(self, values: Leaves) -> Leaves:
        """The values, each on its stage.

        Raises:
            ParallelizeError: one of them is on devices of other processes, and not where it belongs.
        """
        self._known = list(map(_home, self._names, values, self._shardings))
        return list(self._known)


def _home(name: str, x: Any, home: NamedSharding) -> jax.Array:
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    if isinstance(x, jax.Array) and _lies_as(x.sharding, home, x.ndim):
        return x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.is_fully_replicated and home.device_set <= x.sharding.device_set:
            return restricted(x, home)
        raise ParallelizeError(
            f"TrainStep: {name} was assigned {x.dtype}{list(x.shape)} on devices {sorted(d.id for d in x.sharding.device_set)}, some "
            f"of other processes, and its stage has the devices {sorted(d.id for d in home.device_set)}. Assign in all processes "
            f"the same value, on devices of their own: variable.set_value(jax.random.key(step)), for instance."
        )
    indices = home.addressable_devices_indices_map(x.shape)
    parts = [jax.device_put(x[index], device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(x.shape, home, parts, dtype=x.dtype)


def _lies_as(sharding: Any, home: NamedSharding, ndim: int) -> bool:
    """Also one device alone has a mesh, which tells its rank."""
    is_there = isinstance(sharding, NamedSharding) and sharding.mesh == home.mesh
    return is_there and sharding.is_equivalent_to(home, ndim)
