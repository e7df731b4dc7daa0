"""Orbax's array handler, made to know arrays that lie on a part of the processes only: those of pipeline stages.

    process 0 (stage 0)     blocks.0.kernel: its parts          blocks.1.kernel: no part
    process 1 (stage 1)     blocks.0.kernel: no part            blocks.1.kernel: its parts
    on disk                 blocks.0.kernel, blocks.1.kernel: as if one process had written both

Orbax refuses an array that lies on one process alone, and asks every array for a part on this process. Here each process
writes the parts that it has; the first process notes shape and dtype of every array, also of those it has no part of.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

NO_REPLICA = 1 << 30  # replica 0 writes; this one never does


class StageArrayHandler(type_handlers.ArrayHandler):
    """Writes and reads arrays of which this process may have all parts, some or none."""

    async def serialize(self, values: Sequence[Any], infos: Any, args: Any = None) -> Any:
        """Writes this process's parts of the arrays."""
        views: Any = [_view(x) for x in values]
        return await super().serialize(views, infos, args)

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        """Reads this process's parts; an array with none is made without reading."""
        assert args is not None
        here = [i for i, wanted in enumerate(args) if wanted.sharding.addressable_devices]
        found = await super().deserialize([infos[i] for i in here], [args[i] for i in here]) if here else []
        read = dict(zip(here, found, strict=True))
        return [read[i] if i in read else _without_parts(wanted) for i, wanted in enumerate(args)]


def stage_registry() -> Any:
    """Handlers by type: arrays as above, host arrays as Orbax does."""
    return type_handlers.create_type_handler_registry(
        (jax.Array, StageArrayHandler()),
        (np.ndarray, type_handlers.NumpyHandler()),
    )


class _Here:
    """An array, for code that takes arrays of one process for a mistake."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


class _Elsewhere(_Here):
    """An array without a part here: it tells the shape of its parts, and has nothing to write."""

    @property
    def addressable_shards(self) -> list[Any]:
        shape = self._array.sharding.shard_shape(self._array.shape)
        part = jax.ShapeDtypeStruct(shape, self._array.dtype)
        return [SimpleNamespace(index=None, replica_id=NO_REPLICA, data=part)]


def _view(array: jax.Array) -> _Here:
    return _Here(array) if array.sharding.addressable_devices else _Elsewhere(array)


def _without_parts(wanted: ocp.ArrayRestoreArgs) -> jax.Array:
    shape, sharding, dtype = wanted.global_shape, wanted.sharding, wanted.dtype
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)  # pyright: ignore
