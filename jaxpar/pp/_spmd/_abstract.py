"""What a stage begins with, without values: to lower the program for devices that are not here."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.pp._stacked import axes, spec
from jaxpar.pp._stage import Stage
from jaxpar.pp._walk import StageArrays

Leaves = list[Any]


def abstract_arrays(
    stage: Stage, params: Sequence[Any], rest: Sequence[Any], batch: Sequence[Any]
) -> StageArrays:
    """Shapes and shardings on the devices of a stage, given the whole model's and the batch's global shapes."""

    def of(xs: Sequence[Any], specs: Sequence[PartitionSpec], which: Sequence[int]) -> Leaves:
        return [_abstract(xs[i].shape, xs[i].dtype, NamedSharding(stage.mesh, specs[i])) for i in which]

    def stacked(types: Sequence[Any]) -> Leaves:
        return [
            _abstract(
                (_num_parts(t, stage), *t.shape),
                t.dtype,
                NamedSharding(stage.mesh, spec(t, stage.mesh.axis_names)),
            )
            for t in types
        ]

    return StageArrays(
        params=of(params, stage.kinds.params, stage.code.params),
        fixed=of(rest, stage.kinds.rest, stage.fixed),
        changed=stacked(stage.changed_types),
        batch=of(batch, [stage.kinds.batch] * len(batch), stage.arrays),
        sums=stacked(stage.sum_types),
        grads=stacked(stage.grad_types),
    )


def _abstract(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _num_parts(type_: Any, stage: Stage) -> int:
    return math.prod(stage.mesh.shape[axis] for axis in axes(type_, stage.mesh.axis_names))
