"""Flax modules seen from below: the class swap of design rule 3, and where the code is running.

    model.__class__ = subclass of type(model)      the same object, the same parameters, one method replaced

The subclass is made once per (class, attributes), so graph definitions stay equal and jit caches hit.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxpar import _compat

ModuleT = TypeVar("ModuleT", bound=nnx.Module)


@functools.cache
def subclass(
    cls: type,
    prefix: str,
    call: Callable[..., Any],
    attributes: tuple[tuple[str, Hashable], ...],
    methods: tuple[str, ...],
) -> type:
    """Returns `cls` with methods replaced; the body receives `(original_method, self, *args, **kwargs)`."""
    namespace = {name: _replaced(getattr(cls, name), call) for name in methods}
    described = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(prefix + cls.__name__, (cls,), namespace | described | dict(attributes))


def swap_class(
    module: ModuleT,
    prefix: str,
    call: Callable[..., Any],
    attributes: dict[str, Hashable] | None = None,
    *,
    methods: tuple[str, ...] = ("__call__",),
) -> ModuleT:
    """Gives `module` the subclass of `subclass`, in place, and returns it."""
    items = tuple(sorted((attributes or {}).items()))
    module.__class__ = subclass(type(module), prefix, call, items, methods)
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
