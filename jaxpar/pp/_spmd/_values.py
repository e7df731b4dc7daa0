"""What lies in a rank's memory between moments, of which type, and who makes and reads it.

    x   received by a stage          read by F, and by B (or I, W)
    k   kept by its F                read by B (or I, W)
    g   gradient of what it sent     read by B (or I, W)
    c   handed on by its I           read by W

Registers of one name and kind are one array, a pool: f32[registers, ...]. A kind is shape, dtype and varying axes, so nothing
is packed or converted, and each rank's values find room in as many registers as the rank with most of them needs. Names have
pools of their own, so that hardly a program both reads a pool and writes it: there XLA would copy all of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import _compat
from jaxpar._module import vary
from jaxpar.pp._code import StageCode
from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._spmd._moments import receiver


@dataclass(frozen=True, order=True)
class Kind:
    """Values that may take each other's place.

    Args:
        shape: of one device's value.
        dtype: the name of its dtype; of a random key that of its words.
        axes: over which it varies.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]

    @classmethod
    def of(cls, type_: Any, axis: str) -> "Kind":
        """The kind of a type; over the pipeline's axis everything varies."""
        plain = jax.eval_shape(_words, jax.ShapeDtypeStruct(type_.shape, type_.dtype))
        return cls(plain.shape, plain.dtype.name, tuple(sorted({*_compat.varying_axes(type_), axis})))

    def zeros(self, *leading: int) -> jax.Array:
        """Empty registers."""
        return vary(jnp.zeros((*leading, *self.shape), self.dtype), self.axes)

    def value(self, x: jax.Array) -> jax.Array:
        """A value as it lies in a register."""
        return vary(_words(x), self.axes)


def typed(x: jax.Array, type_: Any) -> jax.Array:
    """What lies in a register as the program of a stage knows it.

    A constant of the program lies there as varying, and is equal on all devices all the same.
    """
    if is_key(type_.dtype):
        x = keys_of(x, type_.dtype)
    now = _compat.varying_axes(jax.typeof(x))
    return _compat.forget_axes(x, tuple(now - _compat.varying_axes(type_)))


def keys_of(words: jax.Array, dtype: Any) -> jax.Array:
    """Random keys of a dtype from their words."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return jax.random.wrap_key_data(words, impl=found[0])


def is_key(dtype: Any) -> bool:
    """Whether these are random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _words(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if is_key(x.dtype) else x


Pool = tuple[str, Kind]


@dataclass(frozen=True)
class Value:
    """One array of one microbatch of a stage: `name` is x, k, g or c."""

    name: str
    stage: int
    microbatch: int
    position: int


class Values:
    """What each action reads and makes, in the order of the stage's programs.

    Args:
        codes: of all stages.
        axis: the pipeline's.
    """

    def __init__(self, codes: Sequence[StageCode], axis: str) -> None:
        self.codes = tuple(codes)
        self._types = [
            {"x": c.received, "k": c.kept, "g": c.gradients_after, "c": c.halves.carry_types} for c in codes
        ]
        self._kinds = [
            {name: [Kind.of(t, axis) for t in types] for name, types in of_stage.items()}
            for of_stage in self._types
        ]

    def type_of(self, value: Value) -> Any:
        """As the programs of its stage know it."""
        return self._types[value.stage][value.name][value.position]

    def kind_of(self, value: Value) -> Kind:
        """What may take its place."""
        return self._kinds[value.stage][value.name][value.position]

    def pool_of(self, value: Value) -> Pool:
        """The registers among which it is."""
        return value.name, self.kind_of(value)

    def read(self, action: Action) -> list[Value]:
        """What an action takes from registers."""
        s, code = action.stage, self.codes[action.stage]
        if action.op == Op.F:
            return [*self._all("x", s, action)]
        given = [*self._all("k", s, action), *self._all("x", s, action), *self._all("g", s, action)]
        if action.op != Op.W:
            return given
        num_params = len(code.params)
        used = [given[i - num_params] for i in code.halves.second_uses if i >= num_params]
        return [*used, *self._all("c", s, action)]

    def kept(self, action: Action) -> list[Value]:
        """What an action leaves for later actions of its own stage."""
        names = {Op.F: "k", Op.I: "c"}
        return [*self._all(names[action.op], action.stage, action)] if action.op in names else []

    def handed_on(self, action: Action) -> list[Value]:
        """What an action makes for the stage after or before."""
        to = receiver(action, len(self.codes))
        return [] if to is None else [*self._all("x" if action.op == Op.F else "g", to, action)]

    def _all(self, name: str, stage: int, action: Action) -> Iterator[Value]:
        assert action.microbatch is not None
        return (Value(name, stage, action.microbatch, i) for i in range(len(self._types[stage][name])))
