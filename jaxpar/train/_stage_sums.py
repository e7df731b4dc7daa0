"""Sums of losses and metrics of a rank whose shape is not the last one's: summed over its own devices before they move.

    rank 0 (dp 4)   f32[4@dp]  --all-reduce-->  f32[], on every device  -->  rank 1 (dp 2): the part of its first rank

A plain number is one part of a mean of equal parts, of which there are as many as ranks: it is scaled to the last rank's number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxpar._mean import Mean
from jaxpar._pytree import leaf_names
from jaxpar.pp._stacked import spec, stack, unstack
from jaxpar.train._metrics import sum_over_ranks

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class SumsOfRank:
    """Args:
    names: of the sums, for messages.
    is_plain: for each whether it has no count.
    scale: of those.
    axes: over which the rank splits batch and sequences.
    """

    names: tuple[str, ...]
    is_plain: tuple[bool, ...]
    scale: float
    axes: tuple[str, ...]

    def compiled(self, mesh: Mesh, types: Sequence[Any]) -> Callable[..., Any]:
        """`(sums between programs) -> (sums, equal on all devices)`, between programs too."""

        def run(sums: Leaves) -> Leaves:
            mine = {name: unstack(x) for name, x in zip(self.names, sums, strict=True)}
            whole, _ = sum_over_ranks(mine, [], self.axes)
            return [
                stack(whole[name] * self.scale if plain else whole[name])
                for name, plain in zip(self.names, self.is_plain, strict=True)
            ]

        specs = [spec(t, mesh.axis_names) for t in types]
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec()))


def sums_of_rank(treedef: Any, which: Sequence[int], axes: tuple[str, ...], scale: float) -> SumsOfRank:
    """Of the metrics, as `Mean`s, what one rank sums.

    Args:
        treedef: of all metrics.
        which: numbers of the rank's sums.
        axes: over which it splits batch and sequences.
        scale: data ranks of the last rank over those of this one.
    """
    means = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    names = leaf_names(means)
    found = jax.tree.leaves(means, is_leaf=lambda x: isinstance(x, Mean))
    plain = {mean.total for mean in found if mean.count is None}
    return SumsOfRank(tuple(names[i] for i in which), tuple(i in plain for i in which), scale, axes)
