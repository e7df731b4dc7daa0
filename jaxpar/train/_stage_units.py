"""The units of a stage, gathered once for all microbatches of a step, their gradients scattered once after them.

stored parts  --all-gather, before the first F-->  whole parameters, kept by the stage until its last B
parts of the gradients  <--reduce-scatter, after the last B--  sums of whole gradients
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.fsdp._whole import Units
from jaxpar.pp._stacked import stack
from jaxpar.pp._stage import Stage
from jaxpar.train._sums import GradientSums

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class StageUnits:
    """Args:
    units: of the stage; their leaves are positions among its parameters.
    sums: how the stage's parameters are summed.
    """

    units: Units
    sums: GradientSums

    def scattered(self, grads: Leaves, params: Leaves) -> Leaves:
        """This device's parts of summed gradients; inside `jax.shard_map`."""
        return self.units.scatter(grads, self.sums.marked(params))

    def gathering(self, stage: Stage) -> Callable[..., Any]:
        """`(params) -> (whole params between programs)`, compiled."""

        def run(params: Leaves) -> Leaves:
            return [stack(x) for x in self.units.gather(self.sums.marked(params))]

        stored = [stage.kinds.params[i] for i in stage.code.params]
        whole = stage.specs(stage.code.param_types)
        return jax.jit(jax.shard_map(run, mesh=stage.mesh, in_specs=(stored,), out_specs=whole))


def units_of_stage(units: Units | None, sums: GradientSums, params: Sequence[int]) -> StageUnits | None:
    """Of the units of the whole model, what a stage has that uses these parameters; None if none is to be gathered."""
    return None if units is None else StageUnits(units.among(params), sums.of(params))
