"""Flax modules seen from below: the class swap of design rule 3, and where the code is running.

    model.__class__ = subclass of type(model)      the same object, the same parameters, one method replaced

The subclass is made once per (class, layer), so graph definitions stay equal and jit caches hit.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxpar import _compat

ModuleT = TypeVar("ModuleT", bound=nnx.Module)
INNERMOST, INSIDE, OUTSIDE = range(3)
_LAYER = "_jaxpar_layer"


@dataclass(frozen=True)
class Layer:
    """What a generated class adds to the class below it.

    Args:
        prefix: of its name.
        call: the body of its methods, `call(original_method, self, *args, **kwargs)`.
        attributes: of the class.
        methods: names of the methods that are replaced.
        level: layers lie in the order of their levels, whichever was added first.
    """

    prefix: str
    call: Callable[..., Any]
    attributes: tuple[tuple[str, Hashable], ...] = ()
    methods: tuple[str, ...] = ("__call__",)
    level: int = OUTSIDE


@functools.cache
def subclass(cls: type, layer: Layer) -> type:
    """Returns `cls` with methods replaced."""
    namespace = {name: _replaced(getattr(cls, name), layer.call) for name in layer.methods}
    described = {"__module__": cls.__module__, "__doc__": cls.__doc__, _LAYER: layer}
    return type(layer.prefix + cls.__name__, (cls,), namespace | described | dict(layer.attributes))


def swap_class(
    module: ModuleT,
    prefix: str,
    call: Callable[..., Any],
    attributes: dict[str, Hashable] | None = None,
    *,
    methods: tuple[str, ...] = ("__call__",),
    level: int = OUTSIDE,
) -> ModuleT:
    """Gives `module` a subclass of its class, in place, and returns it; see `Layer`.

    A layer `INSIDE` (tensor parallelism: what the module computes) is put below those `OUTSIDE` (what is gathered
    before, what is reduced after) that are there already, and one `INNERMOST` (another maths) below both.
    """
    layer = Layer(prefix, call, tuple(sorted((attributes or {}).items())), methods, level)
    cls, above = type(module), []
    while (top := vars(cls).get(_LAYER)) is not None and top.level > level:
        above.append(top)
        cls = cls.__bases__[0]
    module.__class__ = functools.reduce(subclass, (layer, *reversed(above)), cls)
    return module


def _replaced(method: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(functools.partial(method, self), self, *args, **kwargs)

    return replacement


def manual_axes() -> tuple[str, ...]:
    """Returns the mesh axes that are manual here: non-empty inside `jax.shard_map`, empty in global view."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Returns the manual axes over which `x` may differ from device to device (JAX's varying-axes type)."""
    return _compat.varying_axes(jax.typeof(x))


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Marks `x` as varying over `axes`; axes over which it already varies are left alone. No communication."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
