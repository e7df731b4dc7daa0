"""What ends a pipelined step: losses of the whole batch, gradients reduced over it, one norm over all stages.

last stage   sums of losses, all stages' metrics  ->  metrics, 1 / count           one all-reduce over the batch axes
each stage   sums of gradients, 1 / count         ->  gradients                    as without a pipeline, on its own devices
each stage   gradients -> sum of squares          ->  norm, on the last stage      if clipping
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxpar._mean import Mean
from jaxpar.pp._stacked import unstack
from jaxpar.pp._stage import Stage
from jaxpar.train._local import LocalStep
from jaxpar.train._metrics import sum_over_ranks, values
from jaxpar.train._stage_units import StageUnits
from jaxpar.train._sums import GradientSums

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class MeansOfAll:
    """Sums of losses and metrics, per device and of all microbatches, to the metrics of the whole batch.

    Args:
        treedef: of the metrics, as `Mean`s.
        local: the step's options: axes, number of ranks.
        num_parts: ranks times microbatches.
    num_losses: the same, of the stage that computes the loss.
    whole: sums that are given already summed over the devices of their rank, by number.
    """

    treedef: Any
    local: LocalStep
    num_parts: int
    num_losses: int
    whole: frozenset[int] = frozenset()

    def compiled(self, mesh: Mesh, specs: Sequence[PartitionSpec]) -> Callable[..., Any]:
        """`(sums between programs) -> (metrics, 1 / count)`, equal on all devices of a stage."""

        def run(sums: Leaves) -> tuple[Any, jax.Array]:
            mine = [self._once(unstack(x)) if i in self.whole else unstack(x) for i, x in enumerate(sums)]
            means = jax.tree.unflatten(self.treedef, mine)
            means, _ = sum_over_ranks(means, [], self.local.axes)
            loss: Mean = means["loss"]
            count = self.num_losses if loss.count is None else loss.count
            dtype = jnp.promote_types(jnp.result_type(loss.total), jnp.float32)
            return values(means, self.num_parts), self.local.one_over(count, dtype)

        in_specs = (list(specs),)
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec()))

    def _once(self, x: jax.Array) -> jax.Array:
        """A sum over all ranks as the part of the first."""
        axes = self.local.axes
        return jnp.where(jax.lax.axis_index(axes) == 0, x, jnp.zeros_like(x)) if axes else x


@dataclass(frozen=True, eq=False)
class GradientsOfStage:
    """Sums of gradients, per device and of all microbatches, to gradients of the whole batch.

    Args:
        sums: how the stage's parameters are summed.
        local: the step's options.
        changed_axes: for each variable that the stage changed, the axes over which it must be made equal.
        units: whose gradients are of whole parameters, to be scattered here; None: they were in each backward.
    """

    sums: GradientSums
    local: LocalStep
    changed_axes: tuple[tuple[str, ...], ...]
    units: StageUnits | None

    def compiled(self, stage: Stage) -> Callable[..., Any]:
        """`(params, gradients and variables between programs, 1 / count) -> (gradients, variables)`."""

        def run(params: Leaves, grads: Leaves, changed: Leaves, scale: jax.Array) -> tuple[Leaves, Leaves]:
            grads = [unstack(g) for g in grads]
            if self.units is not None:
                grads = self.units.scattered(grads, params)
            scaled = [(g * scale).astype(p.dtype) for g, p in zip(grads, params, strict=True)]
            states = self.sums.reduction.init_states(params)  # of a stateless hook: nothing
            reduced, _ = self.sums.after_backward(scaled, states, self.sums.plan(params), scale)
            return reduced, self.local.made_equal([unstack(x) for x in changed], self.changed_axes)

        params = [stage.kinds.params[i] for i in stage.code.params]
        changed = [stage.kinds.rest[i] for i in stage.changed]
        in_specs = (params, stage.specs(stage.grad_types), stage.specs(stage.changed_types), PartitionSpec())
        mapped = jax.shard_map(run, mesh=stage.mesh, in_specs=in_specs, out_specs=(params, changed))
        return jax.jit(mapped)
