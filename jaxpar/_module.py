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
    cls: type, prefix: str, call: Callable[..., Any], attributes: tuple[tuple[str, Hashable], ...]
) -> type:
    """Returns `cls` with `__call__` replaced; the body receives `(original_call, self, *args, **kwargs)`."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(functools.partial(cls.__call__, self), self, *args, **kwargs)

    namespace = {
        "__call__": functools.wraps(cls.__call__)(__call__),
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
    }
    return type(prefix + cls.__name__, (cls,), namespace | dict(attributes))


def swap_class(
    module: ModuleT, prefix: str, call: Callable[..., Any], attributes: dict[str, Hashable] | None = None
) -> ModuleT:
    """Gives `module` the subclass of `subclass`, in place, and returns it."""
    module.__class__ = subclass(type(module), prefix, call, tuple(sorted((attributes or {}).items())))
    return module


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
