"""Host arrays into the form in which a variable stores them: sharded, padded, a random key, or a plain number.

f32[5, 3] on the host   ->   f32[16] as P("dp")     each process puts its own devices' pieces; nothing travels
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpar._named import NamedArray
from jaxpar._record import is_flat


def as_stored(array: NamedArray, host: np.ndarray) -> Any:
    """The host array, a copy, as the variable stores its value now."""
    old = array.value
    if not isinstance(old, jax.Array | jax.ShapeDtypeStruct):
        return host.copy() if isinstance(old, np.ndarray) else host.item()
    if is_flat(array.variable):
        host = np.pad(host.reshape(-1), (0, old.shape[0] - host.size))
    x = _put(host, old)
    return jax.random.wrap_key_data(x, impl=key_impl(old)) if array.is_key else x


def key_impl(keys: Any) -> Any:
    """The kind of random keys, also of abstract ones."""
    impls = []
    jax.eval_shape(lambda k: impls.append(jax.random.key_impl(k)), keys)
    return impls[0]


def _put(host: np.ndarray, old: Any) -> jax.Array:
    is_placed = isinstance(old.sharding, NamedSharding) or getattr(old, "committed", False)
    if not is_placed:
        return jax.numpy.array(host)
    # A copy of each piece: XLA:CPU may use NumPy's memory as it is, and a training step donates it.
    return jax.make_array_from_callback(host.shape, old.sharding, lambda index: np.array(host[index]))
