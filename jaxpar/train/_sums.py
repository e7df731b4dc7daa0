"""How every parameter's gradient becomes the sum over the batch axes: of the whole, or of this device's slice.

parameter is                                gradient
replicated                                  all-reduced in a bucket                         (DDP)
replicated, its optimizer state is not      reduce-scattered in a bucket, each one a slice  (ZeRO-1)
sharded by fully_shard                      scattered by its unit; replicas of the shard all-reduced in a bucket
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpar._compat import forget_axes
from jaxpar._module import vary, varying_axes
from jaxpar._pytree import PyTree
from jaxpar.ddp._buckets import Bucket
from jaxpar.ddp._reduce import Reduction, Tokens, reduce_buckets, reduce_in_backward, start_after
from jaxpar.fsdp._slices import Slices
from jaxpar.fsdp._zero1 import Cut

Leaves = list[jax.Array]


@dataclass(frozen=True)
class Plan:
    """What travels together, in the order in which gradients become ready.

    Args:
        buckets: of what is all-reduced.
        groups: of what is reduce-scattered.
    """

    buckets: tuple[Bucket, ...]
    groups: tuple[Bucket, ...]

    @property
    def sliced(self) -> list[tuple[int, ...]]:
        """The leaves of each group."""
        return [group.leaves for group in self.groups]


@dataclass(frozen=True)
class GradientSums:
    """How gradients are summed; everything is per device, inside `jax.shard_map`.

    Args:
        axes: for each parameter, the batch axes over which it is replicated: its gradient is summed there.
        slices: parameters of which this device updates a slice.
        reduction: bucket sizes and hook.
    """

    axes: tuple[tuple[str, ...], ...]
    slices: Slices
    reduction: Reduction

    def of(self, which: Sequence[int]) -> "GradientSums":
        """The same for some of the parameters."""
        slices = dataclasses.replace(
            self.slices,
            dims=tuple(self.slices.dims[i] for i in which),
            axes=tuple(self.slices.axes[i] for i in which),
        )
        return GradientSums(tuple(self.axes[i] for i in which), slices, self.reduction)

    def plan(self, params: Leaves, order: Sequence[int] | None = None) -> Plan:
        """Fills the buckets; in the order of the parameters from the last one, or in another one."""
        left = [
            tuple(axis for axis in axes if axis not in cut)
            for axes, cut in zip(self.axes, self.slices.axes, strict=True)
        ]
        return Plan(
            self.reduction.buckets(self.slices.take(params), left, order),
            self.reduction.buckets(params, self.slices.axes, order),
        )

    def marked(self, params: Leaves) -> Leaves:
        """The parameters as varying over the axes on which they are summed: nobody else sums them then."""
        return [vary(p, axes) for p, axes in zip(params, self.axes, strict=True)]

    def in_backward(
        self, mine: Leaves, params: Leaves, states: Sequence[PyTree], plan: Plan
    ) -> tuple[Leaves, tuple[Tokens, jax.Array]]:
        """The parameters for a forward pass, and tokens; the backward sums where gradients are ready.

        The cotangent of `mine` (`slices.take(params)`) is the summed gradient; that of `states` the hook's next
        states; that of the tokens is what the first sum waits for (`start`).
        """
        marked, tokens = reduce_in_backward(mine, self.reduction, plan.buckets, states)
        whole, token = self.slices.whole(marked, self.marked(params), plan.sliced)
        return whole, (tokens, token)

    def start(self, number: jax.Array, plan: Plan) -> tuple[Tokens, jax.Array]:
        """Cotangents of the tokens that make the first sums wait for `number`, which is equal on all devices."""
        # Replicas that differ have numbers of their own, which are no part of the second token's type.
        alone = forget_axes(number.astype(jnp.float32), tuple(varying_axes(number)))
        return start_after(number, plan.buckets), alone

    def after_backward(
        self, grads: Leaves, states: Sequence[PyTree], plan: Plan, number: jax.Array
    ) -> tuple[Leaves, tuple[PyTree, ...]]:
        """The sums of gradients that are all ready; the first waits for `number`."""
        grads = self.slices.scatter(grads, plan.sliced, number)
        return reduce_buckets(grads, self.reduction, plan.buckets, states, after=number)

    def gathered(self, mine: Leaves, params: Leaves) -> Leaves:
        """Updated parameters, whole on every device, from this device's slices; of `params` the shapes count."""
        return self.slices.gather(mine, self.plan(params).sliced)


def slices_of(cuts: Sequence[Cut | None], live: tuple[str, ...], flatten_below_bytes: int) -> Slices:
    """The slices that devices update, given how the state of each parameter is cut; axes of size 1 cut nothing."""
    axes = [tuple(axis for axis in (cut.axes if cut else ()) if axis in live) for cut in cuts]
    dims = [cut.dim if cut and mine else None for cut, mine in zip(cuts, axes, strict=True)]
    return Slices(tuple(dims), tuple(axes), flatten_below_bytes)
