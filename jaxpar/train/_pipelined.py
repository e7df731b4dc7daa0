"""A pipelined step: the loss is traced and cut once per batch shape, the schedule walked in every step.

    first call      trace -> stages -> parameters and optimizer state move to the devices of their stage
    every call      start -> schedule (F, B, I, W) -> losses, 1 / count -> gradients reduced, clipped -> optimizer, per stage

Inside a stage everything is as without a pipeline: the same forward, the same gradient sums, the same optimizer. A parameter
that several stages use (tied weights) belongs to the first of them: gradients are added there, the updated value is copied.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar import _compat
from jaxpar._errors import ParallelizeError
from jaxpar._module import vary
from jaxpar._pytree import PyTree
from jaxpar.pp import PipelinePlan
from jaxpar.pp._code import StageCode, trace_stages
from jaxpar.pp._local import StageArrays, run_schedule
from jaxpar.pp._split_points import mark_splits
from jaxpar.pp._stage import Kinds, Stage
from jaxpar.train._checks import check_pipelined
from jaxpar.train._clip import Norm
from jaxpar.train._parts import Parts, check_rows
from jaxpar.train._stage_end import GradientsOfStage, MeansOfAll
from jaxpar.train._stage_place import spec_on_stage, stage_mesh
from jaxpar.train._stage_update import StageUpdate, cut_update, shape_of
from jaxpar.train._sums import GradientSums
from jaxpar.train._variables import Variables

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class Compiled:
    """What is known for one shape of the batch."""

    stages: tuple[Stage, ...]
    means: Callable[..., Any]
    ends: tuple[Callable[..., Any], ...]
    sum_homes: tuple[tuple[int, int], ...]
    sum_shardings: tuple[NamedSharding, ...]


class PipelinedStep:
    """The engine of a `TrainStep` whose model was given to `pipeline`; see there for the arguments."""

    def __init__(self, plan: PipelinePlan, parts: Parts, *, donate: bool) -> None:
        check_pipelined(parts, plan)
        self._plan, self._donate = plan, donate
        self._mesh, self._batch_axes = parts.mesh, parts.batch_axes
        self._model, self._optimizer = parts.model, parts.optimizer
        self._clip = None if parts.clip is None else (parts.clip[0], Norm(parts.clip[1]))
        merge = functools.partial(_merge_marked, parts.model, plan)
        self._local = dataclasses.replace(parts.local, merge=merge)
        self._meshes = tuple(stage_mesh(self._mesh, plan.axis, rank) for rank in plan.schedule.rank_of_stage)
        self._n_microbatches = plan.schedule.n_microbatches
        params, rest = parts.model.values()
        self._param_specs = tuple(spec_on_stage(x, plan.axis) for x in params)
        self._rest_specs = tuple(spec_on_stage(x, plan.axis) for x in rest)
        self._compiled: dict[Any, Compiled] = {}
        self._owners: tuple[int, ...] = ()
        self._copies: dict[tuple[int, str, int], tuple[Any, Any]] = {}
        self._updates: list[Any] = []
        self._state_owners: list[int | None] = []

    def lower(self, batch: PyTree) -> jax.stages.Lowered:
        """There is no one program to lower."""
        raise ParallelizeError(
            "TrainStep.lower: a pipelined step is not one program but several for each stage. Lower the step of the model without "
            "pipeline(...), or look at the schedule: simulate(plan_of(model).schedule)."
        )

    def __call__(self, batch: PyTree) -> dict[str, PyTree]:
        """Runs one step."""
        leaves, treedef = jax.tree.flatten(batch)
        shapes = (treedef, tuple((x.shape, jnp.result_type(x)) for x in leaves))
        if shapes not in self._compiled:
            self._compiled[shapes] = self._compile(leaves, treedef)
        return self._step(self._compiled[shapes], leaves)

    # Trace and compile

    def _compile(self, leaves: Leaves, treedef: Any) -> Compiled:
        num_parts = math.prod(self._mesh.shape[axis] for axis in self._batch_axes)
        check_rows(leaves, num_parts, self._n_microbatches, self._batch_axes)
        codes, kinds, means_treedef = self._trace(leaves, treedef)
        stages = tuple(Stage(code, kinds, mesh) for code, mesh in zip(codes, self._meshes, strict=True))
        if not self._owners:
            self._place(codes)
        last = stages[-1]
        types: list[Any] = [None] * kinds.num_sums
        homes: list[Any] = [None] * kinds.num_sums
        for s, stage in enumerate(stages):
            for position, (i, type_) in enumerate(zip(stage.sums, stage.sum_types, strict=True)):
                types[i], homes[i] = type_, (s, position)
        means = MeansOfAll(means_treedef, self._local, self._local.num_ranks * self._n_microbatches)
        return Compiled(
            stages=stages,
            means=means.compiled(last.mesh, types[1:]),
            ends=tuple(map(self._end_of, stages)),
            sum_homes=tuple(homes[1:]),
            sum_shardings=tuple(last.sharding(t) for t in types[1:]),
        )

    def _trace(self, leaves: Leaves, treedef: Any) -> tuple[tuple[StageCode, ...], Kinds, Any]:
        """Trace the loss of one microbatch on the mesh of a stage, and cut it."""
        found: list[Any] = []
        marks, live = self._local.sums.axes, self._local.axes
        n_stages, m = len(self._meshes), self._n_microbatches
        num_params, num_rest = len(self._param_specs), len(self._rest_specs)

        def capture(params: Leaves, rest: Leaves, batch: Leaves, number: Any) -> jax.Array:
            params = self._local.sums.marked(params)
            rows = [x.reshape(m, -1, *x.shape[1:])[0] for x in batch]
            means_treedef: list[Any] = []

            def whole(*flat: Any) -> Leaves:
                some_params, some_rest = flat[:num_params], flat[num_params : num_params + num_rest]
                some_rows = jax.tree.unflatten(treedef, flat[num_params + num_rest : -1])
                loss, metrics, rest_out = self._local.forward(some_params, some_rest, some_rows, flat[-1])
                means, structure = jax.tree.flatten({"loss": loss, **metrics})
                means_treedef.append(structure)
                return [loss.total, *map(jnp.asarray, means), *rest_out]

            # What the forward lets vary, varies from the start: microbatches follow each other.
            outputs = jax.eval_shape(whole, *params, *rest, *rows, number)
            rest_marks = tuple(
                tuple(a for a in live if a in _compat.varying_axes(t))
                for t in outputs[len(outputs) - num_rest :]
            )
            rest = [vary(x, axes) for x, axes in zip(rest, rest_marks, strict=True)]
            codes = trace_stages(whole, params, rest, [*rows, number], n_stages, remat=self._plan.remat)
            found.append((codes, rest_marks, len(outputs) - num_rest, means_treedef[-1]))
            return number

        batch_spec = PartitionSpec(tuple(a for a in live if a in self._batch_axes) or None)
        specs = (list(self._param_specs), list(self._rest_specs), [batch_spec] * len(leaves), PartitionSpec())
        shapes = (
            *([shape_of(x) for x in xs] for xs in (*self._model.values(), leaves)),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        traced = jax.shard_map(capture, mesh=self._meshes[0], in_specs=specs, out_specs=PartitionSpec())
        jax.eval_shape(traced, *shapes)
        codes, rest_marks, num_sums, means_treedef = found[-1]
        kinds = Kinds(
            self._param_specs, self._rest_specs, batch_spec, marks, rest_marks, num_sums, n_microbatches=m
        )
        return codes, kinds, means_treedef

    def _end_of(self, stage: Stage) -> Callable[..., Any]:
        sums, code = self._local.sums, stage.code
        slices = type(sums.slices)(
            tuple(sums.slices.dims[i] for i in code.params),
            tuple(sums.slices.axes[i] for i in code.params),
            sums.slices.flatten_below_bytes,
        )
        end = GradientsOfStage(
            GradientSums(tuple(sums.axes[i] for i in code.params), slices, sums.reduction),
            self._local,
            tuple(self._local.rest_axes[i] for i in stage.changed),
        )
        return end.compiled(
            stage.mesh,
            [self._param_specs[i] for i in code.params],
            stage.grad_types,
            stage.changed_types,
            [self._rest_specs[i] for i in stage.changed],
        )

    # Where things lie

    def _place(self, codes: Sequence[StageCode]) -> None:
        """Move every parameter, variable and piece of optimizer state to the devices of the stage that owns it."""
        num_params = len(self._param_specs)
        params, rest = self._model.values()
        users = [[s for s, code in enumerate(codes) if i in code.params] for i in range(num_params)]
        self._owners = tuple(min(found, default=0) for found in users)
        readers = [
            [s for s, code in enumerate(codes) if num_params + i in code.others] for i in range(len(rest))
        ]
        self._rest_owners = tuple(min(found, default=0) for found in readers)
        params = [
            self._put(x, spec, s) for x, spec, s in zip(params, self._param_specs, self._owners, strict=True)
        ]
        rest = [
            self._put(x, spec, s)
            for x, spec, s in zip(rest, self._rest_specs, self._rest_owners, strict=True)
        ]
        self._model.assign(params, rest)
        self._cut_update(params, rest)

    def _put(self, x: Any, spec: PartitionSpec, stage: int) -> Any:
        return jax.device_put(x, NamedSharding(self._meshes[stage], spec))

    def _on(self, stage: int, kind: str, i: int, x: Any, spec: PartitionSpec) -> Any:
        """`x` on the devices of a stage; a copy is made when the value is another one than last time."""
        sharding = NamedSharding(self._meshes[stage], spec)
        if x.sharding == sharding:
            return x
        known = self._copies.get((stage, kind, i))
        if known is None or known[0] is not x:
            known = self._copies[stage, kind, i] = (x, jax.device_put(x, sharding))
        return known[1]

    # The step

    def _step(self, compiled: Compiled, batch: Leaves) -> dict[str, PyTree]:
        params, rest = self._model.values()
        arrays, counts = [], []
        for s, stage in enumerate(compiled.stages):
            mine = [self._on(s, "param", i, params[i], self._param_specs[i]) for i in stage.code.params]
            fixed = [self._on(s, "rest", i, rest[i], self._rest_specs[i]) for i in stage.fixed]
            changed = [self._on(s, "rest", i, rest[i], self._rest_specs[i]) for i in stage.changed]
            sums, grads, changed = stage.start(mine, changed)
            rows = [
                jax.device_put(batch[i], NamedSharding(stage.mesh, stage.kinds.batch)) for i in stage.arrays
            ]
            arrays.append(StageArrays(mine, fixed, changed, rows, sums, grads))
            counts.append(frozenset(j for j, i in enumerate(stage.changed) if i in self._local.counts))
        run_schedule(self._plan.schedule, compiled.stages, arrays, counts)
        sums = [
            jax.device_put(arrays[s].sums[position], sharding)
            for (s, position), sharding in zip(compiled.sum_homes, compiled.sum_shardings, strict=True)
        ]
        metrics, scale = compiled.means(sums)
        grads = self._gradients(compiled, arrays, scale, params, rest)
        return dict(metrics) | self._update(grads, params, rest)

    def _gradients(
        self, compiled: Compiled, arrays: Sequence[StageArrays], scale: Any, params: Leaves, rest: Leaves
    ) -> Leaves:
        """The gradient of every parameter, on the stage that owns it; `rest` gets the changed variables."""
        grads: Leaves = [None] * len(params)
        for stage, a, end in zip(compiled.stages, arrays, compiled.ends, strict=True):
            here = jax.device_put(scale, NamedSharding(stage.mesh, PartitionSpec()))
            reduced, changed = end(a.params, a.grads, a.changed, here)
            for i, x in zip(stage.changed, changed, strict=True):
                rest[i] = self._put(x, self._rest_specs[i], self._rest_owners[i])
            for i, g in zip(stage.code.params, reduced, strict=True):
                g = self._put(g, self._param_specs[i], self._owners[i])
                grads[i] = g if grads[i] is None else grads[i] + g
        return [jnp.zeros_like(p) if g is None else g for g, p in zip(grads, params, strict=True)]

    def _update(self, grads: Leaves, params: Leaves, rest: Leaves) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        factors: list[Any] = [None] * len(self._meshes)
        if self._clip is not None:
            metrics["grad_norm"], factors = self._norm(grads)
        state = [*self._optimizer.values()[0], *self._optimizer.values()[1]]
        inputs = [*grads, *params, *rest, *state]
        num_params, first_state = len(params), 2 * len(params) + len(rest)
        new_params, new_state = list(params), list(state)
        for s, (part, program) in enumerate(self._updates):
            taken = [
                self._on(s, "state", i - first_state, inputs[i], PartitionSpec())
                if i >= first_state and self._state_owners[i - first_state] is None
                else inputs[i]
                for i in part.inputs
            ]
            outputs = program(taken, factors[s])
            for i, x in zip(part.outputs, outputs, strict=True):
                if i < num_params:
                    new_params[i] = x
                elif self._state_owners[i - num_params] == s or s == 0:
                    new_state[i - num_params] = x
        self._model.assign(new_params, rest)
        num_chosen = len(self._optimizer.chosen)
        self._optimizer.assign(new_state[:num_chosen], new_state[num_chosen:])
        return metrics

    def _norm(self, grads: Leaves) -> tuple[Any, list[Any]]:
        """The norm over the gradients of all stages, each counted once, and the factor on the devices of each stage."""
        assert self._clip is not None
        max_norm, norm = self._clip
        by_stage = [
            [g for g, owner in zip(grads, self._owners, strict=True) if owner == s]
            for s in range(len(self._meshes))
        ]
        home = NamedSharding(self._meshes[-1], PartitionSpec())
        parts = [jax.device_put(_part_of(norm, mine), home) for mine in by_stage if mine]
        total, factor = _root_of(norm, max_norm, parts)
        return total, [jax.device_put(factor, NamedSharding(mesh, PartitionSpec())) for mesh in self._meshes]

    def _cut_update(self, params: Leaves, rest: Leaves) -> None:
        """Cut the optimizer's update by stage, and move its state there."""
        num_params, num_rest = len(params), len(rest)
        chosen, other = self._optimizer.values()
        num_chosen = len(chosen)

        def update(*flat: Any) -> Leaves:
            grads, values, others, state = _split(flat, num_params, num_params, num_rest)
            model = self._model.merge(values, others)
            optimizer = self._optimizer.merge(state[:num_chosen], state[num_chosen:])
            optimizer.update(model, jax.tree.unflatten(self._model.treedefs[0], list(grads)))
            mine, _ = self._model.split(model)
            new_chosen, new_other = self._optimizer.split(optimizer)
            return [*mine, *new_chosen, *new_other]

        arguments = [shape_of(x) for x in (*params, *params, *rest, *chosen, *other)]
        owner = [*self._owners, *self._owners, *[None] * (num_rest + len(chosen) + len(other))]
        names = [
            *self._model.chosen_names,
            *(f"optimizer state {i}" for i in range(len(chosen) + len(other))),
        ]
        parts, owners = cut_update(update, arguments, owner, names, len(self._meshes))
        self._state_owners = owners[num_params:]
        state = [
            jax.device_put(x, NamedSharding(self._meshes[owner or 0], spec_on_stage(x, self._plan.axis)))
            for x, owner in zip((*chosen, *other), self._state_owners, strict=True)
        ]
        self._optimizer.assign(state[:num_chosen], state[num_chosen:])
        kept = [x.sharding for x in (*params, *state)]
        for s, part in enumerate(parts):
            out = [
                NamedSharding(self._meshes[s], kept[i].spec) if owners[i] is None else kept[i]
                for i in part.outputs
            ]
            self._updates.append(
                (part, jax.jit(functools.partial(_apply, part, num_params), out_shardings=out))
            )


def _merge_marked(model: Variables, plan: PipelinePlan, params: Sequence[Any], rest: Sequence[Any]) -> Any:
    """The model, with the entries of its stages marked."""
    merged = model.merge(params, rest)
    mark_splits(merged, plan.splits)
    return merged


def _apply(part: StageUpdate, num_params: int, inputs: Leaves, factor: Any) -> Leaves:
    if factor is not None:
        inputs = [
            (x * factor).astype(x.dtype) if i < num_params else x
            for i, x in zip(part.inputs, inputs, strict=True)
        ]
    return part.program(*inputs)


@functools.partial(jax.jit, static_argnums=0)
def _part_of(norm: Norm, grads: Leaves) -> jax.Array:
    return norm.join(map(norm.part, grads))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _root_of(norm: Norm, max_norm: float, parts: Leaves) -> tuple[jax.Array, jax.Array]:
    total = norm.root(norm.join(parts))
    return total, jnp.minimum(1.0, max_norm / (total + 1e-6))


def _split(flat: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(flat[start : start + size])
        start += size
    return [*parts, flat[start:]]
