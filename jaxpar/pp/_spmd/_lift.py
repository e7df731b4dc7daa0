"""Scalars and random keys on their way into a slot, which splits dim 0 and holds plain numbers.

    f32[]      ->  f32[1]
    key[]      ->  u32[1, 2]      its words

Only what is another array than last time is lifted again; keys and constants are lifted once.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.pp._spmd._values import is_key, keys_of

Leaves = list[Any]


class Lift:
    """Lifts the arrays of one role of one stage."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, arrays: Leaves) -> Leaves:
        """The same arrays, scalars and keys lifted."""
        return [self._lifted(i, x) if needs_lift(x) else x for i, x in enumerate(arrays)]

    def _lifted(self, i: int, x: Any) -> Any:
        known = self._known.get(i)
        if known is None or known[0] is not x:
            self._known[i] = known = (x, _lift(x))
        return known[1]


def needs_lift(x: Any) -> bool:
    """Whether an array cannot go into a slot as it is."""
    return x.ndim == 0 or is_key(x.dtype)


def lifted_type(x: Any) -> Any:
    """An abstract array as it is lifted."""
    if not needs_lift(x):
        return x
    shape = jax.eval_shape(_lift, jax.ShapeDtypeStruct(x.shape, x.dtype))
    entries = (None,) * (x.ndim == 0) + tuple(x.sharding.spec)
    return jax.ShapeDtypeStruct(
        shape.shape, shape.dtype, sharding=NamedSharding(x.sharding.mesh, PartitionSpec(*entries))
    )


def lowered(x: jax.Array, like: Any) -> jax.Array:
    """A device's part of a slot as the array that it was."""
    x = x[0] if like.ndim == 0 else x
    return keys_of(x, like.dtype) if is_key(like.dtype) else x


@jax.jit
def _lift(x: jax.Array) -> jax.Array:
    plain = jax.random.key_data(x) if is_key(x.dtype) else x
    return plain[None] if x.ndim == 0 else plain
