"""Replicas of a model that differ: every array gets a dim 0 for them, split over the mesh axes along which they lie.

    one replica    w: f32[4, 2] @ P(None, "dp")         count: i32[]      every device of an island: its part of w
    R replicas     w: f32[R, 4, 2] @ P("island", None, "dp")    i32[]     the same: one replica lies on one island

Inside `jax.shard_map` a device has block [1, ...], its own replica's; in global view a function of one replica is mapped over
dim 0. Nothing moves between replicas in either.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar._mean import Mean
from jaxpar._pytree import PyTree
from jaxpar.train._local import LocalStep
from jaxpar.train._metrics import sum_over_ranks, values

Leaves = list[jax.Array]


@dataclass(frozen=True)
class Replicas:
    """Where replicas lie, and which variables they have of their own.

    Args:
        mesh: of the whole job.
        axes: mesh axes along which they lie.
        is_own: for each variable of the model that is not trained whether each replica has its own (floating ones); the others,
            counts and random keys, are equal in all.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    is_own: tuple[bool, ...]

    @property
    def live(self) -> tuple[str, ...]:
        """Those of size above 1."""
        return tuple(axis for axis in self.axes if self.mesh.shape[axis] > 1)

    @property
    def num(self) -> int:
        """How many replicas there are."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def stacked(self, leaves: Sequence[Any], is_own: Sequence[bool] | None = None) -> Leaves:
        """Copies of arrays, one for each replica; of those that are no replica's own one copy. Nothing moves."""
        is_own = [True] * len(leaves) if is_own is None else is_own
        shardings = [self.sharding(x) if own else x.sharding for x, own in zip(leaves, is_own, strict=True)]

        def copies(leaves: Leaves) -> Leaves:
            return [self.repeated(x) if own else jnp.copy(x) for x, own in zip(leaves, is_own, strict=True)]

        return jax.jit(copies, out_shardings=shardings)(list(leaves))

    def repeated(self, x: jax.Array) -> jax.Array:
        """f32[...] to f32[R, ...], in global view."""
        return jnp.broadcast_to(x[None], (self.num, *x.shape))

    def sharding(self, one: Any) -> NamedSharding:
        """Of the stack, given an array of one replica."""
        spec = PartitionSpec(self.axes, *one.sharding.spec)
        return NamedSharding(self.mesh, spec, memory_kind=one.sharding.memory_kind)

    def of_one(self, specs: Sequence[PartitionSpec]) -> list[PartitionSpec]:
        """The specs of one replica's arrays."""
        return [PartitionSpec(*spec[1:]) for spec in specs]

    def local(self, run: LocalStep) -> Callable[..., Any]:
        """What a device does for its replica: `run`, on blocks [1, ...]. Over the replicas' axes metrics are averaged, in one
        all-reduce; nothing else moves there."""

        def of_mine(params: Leaves, rest: Leaves, states: tuple[PyTree, ...], batch: PyTree) -> Any:
            grads, after, states, metrics = run([x[0] for x in params], self.taken(rest), states, batch)
            means = jax.tree.map(lambda x: Mean(x, None), metrics)  # type: ignore[arg-type]
            means, _ = sum_over_ranks(means, [], self.live)
            return [g[None] for g in grads], self.put_back(after), states, values(means, self.num)

        return of_mine

    def taken(self, rest: Leaves) -> Leaves:
        """The variables that are not trained, of this device's replica."""
        return [x[0] if own else x for x, own in zip(rest, self.is_own, strict=True)]

    def put_back(self, rest: Leaves) -> Leaves:
        """The inverse of `taken`."""
        return [x[None] if own else x for x, own in zip(rest, self.is_own, strict=True)]

    def update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """The update of each replica, in global view; the loss is the one of all."""
        rest = [0 if own else None for own in self.is_own]

        def of_each(*arguments: Any) -> Any:
            mapped = jax.vmap(
                update,
                in_axes=(0, 0, rest, 0, 0, None),
                out_axes=((0, rest, 0, 0), 0),
                spmd_axis_name=self.axes,
            )
            updated, norms = mapped(*arguments)
            return updated, jax.tree.map(jnp.mean, norms)

        return of_each


def without(axes: tuple[str, ...], removed: tuple[str, ...]) -> tuple[str, ...]:
    """The other axes."""
    return tuple(axis for axis in axes if axis not in removed)
