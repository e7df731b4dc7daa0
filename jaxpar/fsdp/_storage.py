"""Gives the parameters of units their place: adds the shard axes to what their shardings say already."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar._errors import ParallelizeError
from jaxpar._flat import flatten_and_pad, padded_size
from jaxpar._pytree import matches
from jaxpar._record import KEY, Record, record_of
from jaxpar._spec import as_spec, entries
from jaxpar.fsdp._dims import Choice, Leaf, checked_dim, choose_dim
from jaxpar.fsdp._offload import to_host
from jaxpar.mesh import Shard
from jaxpar.mesh._place import put

ShardDimFn = Callable[[str, Any], Shard | int | None]
Variable = nnx.Variable[Any]


@dataclass(frozen=True)
class Storage:
    """How `fully_shard` was asked to store parameters.

    Args:
        mesh: the whole mesh.
        axes: the axes to add, the first varying slowest.
        shard_dim_fn: the user's choice of dims.
        ignored: variables or globs of names.
        pad_above_bytes: parameters of at least this size are stored flat if no dim divides.
        is_on_host: parameters lie in host memory between steps.
    """

    mesh: jax.sharding.Mesh
    axes: tuple[str, ...]
    shard_dim_fn: ShardDimFn | None
    ignored: tuple[Variable | str, ...]
    pad_above_bytes: int
    is_on_host: bool = False

    @property
    def num_parts(self) -> int:
        """Ranks of the axes to add."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def shard(self, named: Sequence[tuple[str, Variable]], *, strict: bool) -> None:
        """Shards parameters, in place; those that an earlier call sharded over the same axes stay as they are.

        Raises:
            ParallelizeError: a dim that the user chose does not fit, an ignored name is not there, or, under `strict`,
                a parameter is not sharded.
        """
        self._check_ignored(named)
        new = [(name, v) for name, v in named if not self._is_done(v)]
        choices = [self._choose(name, v) for name, v in new]
        left_over = [
            f"{name}: {choice.reason}"
            for (name, v), choice in zip(new, choices, strict=True)
            if choice.dim is None and not choice.is_flat and not self._is_ignored(name, v)
        ]
        if strict and left_over:
            raise ParallelizeError(
                f"fully_shard(strict=True): {len(left_over)} parameters would not be sharded over {self.axes}: "
                f"{'; '.join(left_over)}. Name them in ignored_params, or drop strict."
            )
        for (_, variable), choice in zip(new, choices, strict=True):
            self._store(variable, choice)

    def _is_done(self, variable: Variable) -> bool:
        record = record_of(variable)
        return record is not None and record.dim is not None and record.axes == self.axes

    def _is_ignored(self, name: str, variable: Variable) -> bool:
        return any(matches(name, x) if isinstance(x, str) else x is variable for x in self.ignored)

    def _check_ignored(self, named: Sequence[tuple[str, Variable]]) -> None:
        for pattern in self.ignored:
            if isinstance(pattern, str) and not any(matches(name, pattern) for name, _ in named):
                raise ParallelizeError(
                    f"fully_shard: ignored_params has {pattern!r}, which matches none of the parameters "
                    f"{[name for name, _ in named]}."
                )

    def _choose(self, name: str, variable: Variable) -> Choice:
        if self._is_ignored(name, variable):
            return Choice(None, reason="ignored")
        x = variable.get_value()
        leaf = Leaf.of(name, x, self._spec_without_ours(variable), dict(self.mesh.shape))
        dim = self.shard_dim_fn(name, x) if self.shard_dim_fn else None
        if dim is None:
            return choose_dim(leaf, num_parts=self.num_parts, pad_above_bytes=self.pad_above_bytes)
        return checked_dim(leaf, dim.dim if isinstance(dim, Shard) else dim, self.num_parts)

    def _spec_without_ours(self, variable: Variable) -> PartitionSpec:
        """How other parallelism has sharded the array; what an outer `fully_shard` did is taken back."""
        x, record = variable.get_value(), record_of(variable)
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return PartitionSpec()
        earlier = record.axes if record is not None else ()
        return as_spec(
            [tuple(a for a in axes if a not in earlier) for axes in entries(sharding.spec, x.ndim)]
        )

    def _store(self, variable: Variable, choice: Choice) -> None:
        x = variable.get_value()
        used = entries(self._spec_without_ours(variable), x.ndim)
        if choice.is_flat:
            shape, dim, size = tuple(x.shape), -1, padded_size(x.size, self.num_parts)
            x = self._flat(x)
            used = [self.axes]
        else:
            shape, dim, size = None, None, 0
            if choice.dim is not None:
                dim, size = choice.dim - x.ndim, choice.size
                used[choice.dim] = (*used[choice.dim], *self.axes)
        stored = put(x, NamedSharding(self.mesh, as_spec(used)))
        variable.set_value(to_host(stored) if self.is_on_host else stored)
        variable.set_metadata(KEY, Record(dim, self.axes, shape, choice.reason, size))

    def _flat(self, x: Any) -> Any:
        length = padded_size(x.size, self.num_parts)
        is_abstract = isinstance(x, jax.ShapeDtypeStruct)
        return jax.ShapeDtypeStruct((length,), x.dtype) if is_abstract else flatten_and_pad(x, length)
