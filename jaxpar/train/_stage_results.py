"""What the stages of a step have made, brought to the stages that own it: gradients of parameters, and changed variables.

stage 0 owns the embedding    its own gradient  +  the last stage's, moved there        tied weights
both changed a counter        each for itself, in the same way: nothing moves
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.pp._place import Copies
from jaxpar.pp._ranks import Ranks, elsewhere, wanted
from jaxpar.pp._stage import Stage

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class Owners:
    """Which stage owns what: the first that uses it.

    Args:
        params: of each parameter.
        rest: of each other variable.
    """

    params: tuple[int, ...]
    rest: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StageResults:
    """Args:
    ranks: where stages lie.
    owners: which stage owns what.
    copies: of variables, on the devices of other ranks.
    specs: how each parameter lies on its stage.
    names: of the parameters, for messages.
    """

    ranks: Ranks
    owners: Owners
    copies: Copies
    specs: Sequence[PartitionSpec]
    names: Sequence[str]

    def gradients(
        self,
        stages: Sequence[Stage],
        borrowed: Sequence[Sequence[int]],
        made: Sequence[Leaves | None],
        params: Leaves,
    ) -> Leaves:
        """The gradient of every parameter whose owner is here, the sum over the stages that use it; None for others.

        Args:
            stages: all of them.
            borrowed: for each stage the parameters that another rank owns.
            made: for each stage that is here the gradients of the parameters that it uses.
            params: all parameters, for their shapes.
        """
        grads: Leaves = [None] * len(params)
        for s, (stage, mine) in enumerate(zip(stages, made, strict=True)):
            of_stage = dict(zip(stage.code.params, mine, strict=True)) if mine is not None else {}
            for i in borrowed[s]:
                of_stage[i] = self._given_back(s, i, of_stage.get(i), params[i])
            for i, g in of_stage.items():
                grads[i] = g if grads[i] is None else grads[i] if g is None else grads[i] + g
        for i, owner in enumerate(self.owners.params):
            if grads[i] is None and owner in self.ranks.stages_here:  # nothing uses it
                grads[i] = jnp.zeros_like(params[i])
        return grads

    def variables(self, stages: Sequence[Stage], changed: Sequence[Leaves | None], rest: Leaves) -> Leaves:
        """Other variables after the step. Each stage that uses one has changed it for itself, all in the same way."""
        changes = {
            (s, i): x
            for s, (stage, mine) in enumerate(zip(stages, changed, strict=True))
            for i, x in zip(stage.changed, mine or (), strict=mine is not None)
        }
        after, of_stage = list(rest), self.ranks.of_stage
        for i in {i for stage in stages for i in stage.changed}:
            owner = self.owners.rest[i]
            after[i] = changes[owner, i] if (owner, i) in changes else elsewhere(rest[i])
        for s, stage in enumerate(stages):
            for i in stage.changed:
                if of_stage[s] != of_stage[self.owners.rest[i]]:
                    self.copies.keep(of_stage[s], ("rest", i), after[i], changes.get((s, i), after[i]))
        return after

    def _given_back(self, s: int, i: int, gradient: Any, like: Any) -> Any:
        """The gradient of a parameter that another rank owns, moved there; None where that is not here."""
        owner = self.ranks.of_stage[self.owners.params[i]]
        what = f"the gradient of {self.names[i]}, from stage {s} to the rank that owns it"
        values = None if gradient is None else [gradient]
        type_ = wanted(like, NamedSharding(self.ranks.meshes[owner], self.specs[i]))
        arrival = self.ranks.move(values, self.ranks.of_stage[s], owner, [type_], what)
        return None if arrival is None else arrival()[0]
