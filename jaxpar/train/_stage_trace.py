"""Trace the loss of one microbatch as the devices of a stage see it, and cut it into the programs of all stages.

params, variables, batch (this device's part)  ->  rows of one microbatch  ->  loss, metrics, variables after
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxpar import _compat
from jaxpar._module import vary
from jaxpar.pp._code import StageCode, trace_stages
from jaxpar.pp._dealt import dealt, num_larger
from jaxpar.pp._stage import Kinds
from jaxpar.train._local import LocalStep
from jaxpar.train._metrics import weighted

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class Traced:
    """Args:
    codes: the programs of each stage.
    kinds: how inputs and outputs of the whole program are numbered, and lie.
    means: structure of `{"loss": ..., **metrics}`, whose leaves are the sums after the first.
    rows: how many rows of a microbatch each device has, of each array of the batch.
    """

    codes: tuple[StageCode, ...]
    kinds: Kinds
    means: Any
    rows: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LossTrace:
    """What a trace needs, batch apart.

    Args:
        local: what one device does; its model has the entries of stages marked.
        mesh: of a stage.
        params: how each parameter lies on it.
        rest: how each other variable lies on it.
        n_stages: how many stages.
        n_microbatches: in how many parts each device takes its rows.
        remat: whether stages keep only what they receive.
        is_forward_only: whether there is no backward.
        axis: over which everything is taken to vary, if the mesh is the whole one: the pipeline's axis.
    """

    local: LocalStep
    mesh: Mesh
    params: tuple[PartitionSpec, ...]
    rest: tuple[PartitionSpec, ...]
    n_stages: int
    n_microbatches: int
    remat: bool
    is_forward_only: bool = False
    axis: str | None = None

    def __call__(
        self,
        params: Sequence[Any],
        rest: Sequence[Any],
        batch: Sequence[Any],
        treedef: Any,
        *,
        is_smaller: bool = False,
    ) -> Traced:
        """Traces for arrays, or abstract values, of global shape; nothing is computed.

        If the microbatches are not equal, the larger ones are traced, or the smaller ones.

        Raises:
            ParallelizeError: a split point is not reached, out of order, or a stage has nothing to do.
            BatchError: the loss is no scalar, or differs over an axis that does not split the batch.
        """
        found: list[Traced] = []

        def capture(params: Leaves, rest: Leaves, batch: Leaves, number: jax.Array) -> jax.Array:
            found.append(self._capture(params, rest, batch, number, treedef, is_smaller=is_smaller))
            return number

        specs = (list(self.params), list(self.rest), [self._batch] * len(batch), PartitionSpec())
        shapes = ([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs] for xs in (params, rest, batch))
        mapped = jax.shard_map(capture, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec())
        jax.eval_shape(mapped, *shapes, jax.ShapeDtypeStruct((), jnp.int32))
        return found[-1]

    @property
    def _batch(self) -> PartitionSpec:
        return PartitionSpec(self.local.positions.rows or None)

    def _capture(
        self,
        params: Leaves,
        rest: Leaves,
        batch: Leaves,
        number: jax.Array,
        treedef: Any,
        *,
        is_smaller: bool,
    ) -> Traced:
        if self.axis is not None:
            axes = (self.axis,)
            params, rest, batch = ([vary(x, axes) for x in xs] for xs in (params, rest, batch))
            number = vary(number, axes)
        params = self.local.sums.marked(params)
        if self.local.units is not None:
            params = self.local.units.gather([*params, *rest])[: len(params)]
        rows = [x[: dealt(x.shape[0], self.n_microbatches, is_smaller=is_smaller)[0]] for x in batch]
        local, weight = self._of_size(batch, is_smaller=is_smaller)
        structures: list[Any] = []

        def whole(*flat: Any) -> Leaves:
            left = iter(flat)
            some_params, some_rest, some_rows = ([next(left) for _ in xs] for xs in (params, rest, rows))
            batch = jax.tree.unflatten(treedef, some_rows)
            loss, metrics, rest_out = local.forward(some_params, some_rest, batch, next(left))
            loss, metrics = weighted((loss, metrics), weight)
            means, structure = jax.tree.flatten({"loss": loss, **metrics})
            structures.append(structure)
            return [loss.total, *map(jnp.asarray, means), *rest_out]

        outputs = jax.eval_shape(whole, *params, *rest, *rows, number)
        num_sums = len(outputs) - len(rest)
        # What the forward of one microbatch lets vary, the next one is given varying.
        marks = tuple(
            tuple(axis for axis in self.local.axes if axis in _compat.varying_axes(type_))
            for type_ in outputs[num_sums:]
        )
        rest = [vary(x, axes) for x, axes in zip(rest, marks, strict=True)]
        codes = trace_stages(
            whole,
            params,
            rest,
            [*rows, number],
            self.n_stages,
            remat=self.remat,
            is_forward_only=self.is_forward_only,
        )
        kinds = Kinds(
            params=self.params,
            rest=self.rest,
            batch=self._batch,
            param_marks=self.local.sums.axes,
            rest_marks=marks,
            num_sums=num_sums,
            n_microbatches=self.n_microbatches,
            is_gathered=self.local.units is not None,
            is_smaller=is_smaller,
        )
        return Traced(codes, kinds, structures[-1], tuple(x.shape[0] for x in rows))

    def _of_size(self, batch: Leaves, *, is_smaller: bool) -> tuple[LocalStep, float]:
        """For microbatches of one of two sizes: where their rows lie, and what a mean over them counts."""
        num_rows = batch[0].shape[0] if batch else 0
        if not num_larger(num_rows, self.n_microbatches):
            return self.local, 1.0
        rows, first = dealt(num_rows, self.n_microbatches, is_smaller=is_smaller)
        positions = replace(self.local.positions, rows_of_rank=num_rows, first_row=first)
        return replace(self.local, positions=positions), rows * self.n_microbatches / num_rows
