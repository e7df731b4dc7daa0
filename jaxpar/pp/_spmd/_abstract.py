"""What a stage begins with, without values: to lower the program for devices that are not here."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.pp._ranks import wanted
from jaxpar.pp._stage import Stage
from jaxpar.pp._walk import StageArrays

Leaves = list[Any]


def abstract_arrays(
    stage: Stage, params: Sequence[Any], rest: Sequence[Any], batch: Sequence[Any]
) -> StageArrays:
    """Shapes and shardings on the devices of a stage, given the whole model's and the batch's global shapes."""

    def of(xs: Sequence[Any], specs: Sequence[PartitionSpec], which: Sequence[int]) -> Leaves:
        return [wanted(xs[i], NamedSharding(stage.mesh, specs[i])) for i in which]

    return StageArrays(
        params=of(params, stage.kinds.params, stage.code.params),
        fixed=of(rest, stage.kinds.rest, stage.fixed),
        changed=[*map(stage.between, stage.changed_types)],
        batch=of(batch, [stage.kinds.batch] * len(batch), stage.arrays),
        sums=[*map(stage.between, stage.sum_types)],
        grads=[*map(stage.between, stage.grad_types)],
    )
