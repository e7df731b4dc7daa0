"""The second half of a step, in global view: clip, optimizer, new parameters.

gradients (sharded or not)  -->  clip  -->  optax  -->  new parameters, new state

With ZeRO-1 the optimizer sees parameters cut as their state is (each device takes its slice: nothing moves), and the
updated slices are gathered in the buckets of the gradients: XLA's partitioner would gather each parameter by itself
(and, on jax 0.10.2, over more axes than there are slices).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding

from jaxpar.train._variables import Variables

Leaves = list[jax.Array]


@dataclass(frozen=True)
class Update:
    """Args:
    model: the model's variables.
    optimizer: the optimizer's variables.
    cuts: for each parameter the sharding of its state, if that is cut and the parameter is not.
    clip: gradients to clipped gradients and their norm; None: not clipped.
    gather: updated slices, and the parameters before, to parameters.
    """

    model: Variables
    optimizer: Variables
    cuts: tuple[NamedSharding | None, ...]
    clip: Callable[[Leaves], tuple[Leaves, jax.Array]] | None
    gather: Callable[[Leaves, Leaves], Leaves]

    def __call__(
        self,
        grads: Leaves,
        params: Leaves,
        rest: Leaves,
        chosen: Leaves,
        other: Leaves,
        loss: jax.Array | None = None,
    ) -> tuple[tuple[Leaves, Leaves, Leaves, Leaves], dict[str, jax.Array]]:
        """Returns parameters, the model's other leaves, and the optimizer's, updated; and what there is to report.

        The optimizer gets the loss too, if there is one and it takes more than gradients.
        """
        metrics = {}
        if self.clip is not None:
            grads, metrics["grad_norm"] = self.clip(grads)
        model = self.model.merge(self._cut(params), rest)
        optimizer = self.optimizer.merge(chosen, other)
        grads_of_all = jax.tree.unflatten(self.model.treedefs[0], grads)
        optimizer.update(model, grads_of_all, **extra_arguments(optimizer, loss))
        mine, rest = self.model.split(model)
        params = self.gather(self._cut(mine), params) if any(self.cuts) else mine
        return (params, rest, *self.optimizer.split(optimizer)), metrics

    def _cut(self, params: Leaves) -> Leaves:
        return [
            p if cut is None else jax.lax.with_sharding_constraint(p, cut)
            for p, cut in zip(params, self.cuts, strict=True)
        ]


def extra_arguments(optimizer: nnx.Optimizer, loss: jax.Array | None) -> dict[str, jax.Array]:
    """What an optax transformation may ask for beside gradients: `value`, the loss."""
    takes_more = isinstance(optimizer.tx, optax.GradientTransformationExtraArgs)
    return {"value": loss} if takes_more and loss is not None else {}
