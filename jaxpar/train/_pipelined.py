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

from jaxpar._errors import ParallelizeError
from jaxpar._pytree import PyTree
from jaxpar.fsdp._order import restart_order
from jaxpar.pp import Costs, PipelinePlan
from jaxpar.pp._code import StageCode
from jaxpar.pp._local import StageArrays, run_schedule
from jaxpar.pp._measure import measure
from jaxpar.pp._place import Copies, spec_on_stage, stage_mesh
from jaxpar.pp._schedule._action import Op
from jaxpar.pp._split_points import mark_splits
from jaxpar.pp._stage import Stage
from jaxpar.train._checks import check_pipelined
from jaxpar.train._clip import Norm
from jaxpar.train._parts import Parts, check_rows
from jaxpar.train._stage_end import GradientsOfStage, MeansOfAll
from jaxpar.train._stage_optimizer import StageOptimizer
from jaxpar.train._stage_trace import LossTrace
from jaxpar.train._variables import Variables

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class Compiled:
    """What is known for one shape of the batch.

    Args:
        stages: the programs of each stage.
        means: `(sums of all stages) -> (metrics, 1 / count)`, on the last stage.
        ends: for each stage, gradients from their sums.
        sums: where each sum is made (stage, position), and where it is wanted.
    """

    stages: tuple[Stage, ...]
    means: Callable[..., Any]
    ends: tuple[Callable[..., Any], ...]
    sums: tuple[tuple[int, int, NamedSharding], ...]


@dataclass(frozen=True, eq=False)
class Owners:
    """Which stage owns what: the first that uses it.

    Args:
        params: of each parameter.
        rest: of each other variable.
    """

    params: tuple[int, ...]
    rest: tuple[int, ...]


class PipelinedStep:
    """The engine of a `TrainStep` whose model was given to `pipeline`; see there for what it does.

    Args:
        plan: how the model is cut, and in which order stages run.
        parts: what the step is made of.
        donate: whether buffers of parameters and optimizer state are used again.

    Raises:
        ParallelizeError: an option that a pipelined step does not have.
    """

    def __init__(self, plan: PipelinePlan, parts: Parts, *, donate: bool) -> None:
        check_pipelined(parts, plan)
        self._plan, self._parts, self._donate = plan, parts, donate
        self._model = parts.model
        merge = functools.partial(_merge_marked, parts.model, plan)
        self._local = dataclasses.replace(parts.local, merge=merge, is_cut=True)
        self._meshes = tuple(stage_mesh(parts.mesh, plan.axis, rank) for rank in plan.schedule.rank_of_stage)
        params, rest = self._model.values()
        self._trace = LossTrace(
            local=self._local,
            mesh=self._meshes[0],
            params=tuple(spec_on_stage(x, plan.axis) for x in params),
            rest=tuple(spec_on_stage(x, plan.axis) for x in rest),
            n_stages=len(self._meshes),
            n_microbatches=plan.schedule.n_microbatches,
            remat=plan.remat,
        )
        self._copies = Copies(self._meshes)
        self._compiled: dict[Any, Compiled] = {}
        self._owners: Owners | None = None
        self._optimizer: StageOptimizer | None = None

    def __call__(self, batch: PyTree) -> dict[str, PyTree]:
        """Runs one step."""
        leaves, treedef = jax.tree.flatten(batch)
        return self._step(self._compiled_for(leaves, treedef), leaves)

    def lower(self, batch: PyTree) -> jax.stages.Lowered:
        """There is no one program to lower."""
        raise ParallelizeError(
            "TrainStep.lower: a pipelined step is not one program but several for each stage. Lower the step of the model without "
            "pipeline(...), or look at the plan: simulate(plan_of(model).schedule)."
        )

    def measure(self, batch: PyTree, *, repeats: int) -> Costs:
        """Times the programs of each stage, alone; nothing is trained."""
        leaves, treedef = jax.tree.flatten(batch)
        compiled = self._compiled_for(leaves, treedef)
        params, rest = self._model.values()
        arrays = [self._arrays(s, stage, params, rest, leaves) for s, stage in enumerate(compiled.stages)]
        return measure(compiled.stages, arrays, repeats=repeats)

    # Once per shape of the batch

    def _compiled_for(self, leaves: Leaves, treedef: Any) -> Compiled:
        shapes = (treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves))
        if shapes not in self._compiled:
            self._compiled[shapes] = self._compile(leaves, treedef)
        return self._compiled[shapes]

    def _compile(self, leaves: Leaves, treedef: Any) -> Compiled:
        num_parts = math.prod(self._parts.mesh.shape[axis] for axis in self._parts.batch_axes)
        check_rows(leaves, num_parts, self._plan.schedule.n_microbatches, self._parts.batch_axes)
        traced = self._trace(*self._model.values(), leaves, treedef)
        stages = tuple(
            Stage(code, traced.kinds, mesh) for code, mesh in zip(traced.codes, self._meshes, strict=True)
        )
        self._check_turns(stages)
        if self._owners is None:
            self._place(traced.codes)
        last = stages[-1]
        made = {
            i: (s, position, type_)
            for s, stage in enumerate(stages)
            for position, (i, type_) in enumerate(zip(stage.sums, stage.sum_types, strict=True))
        }
        wanted = [made[i] for i in range(1, traced.kinds.num_sums)]  # the first is the total, once more
        means = MeansOfAll(traced.means, self._local, self._local.num_ranks * traced.kinds.n_microbatches)
        return Compiled(
            stages=stages,
            means=means.compiled(last.mesh, [type_ for _, _, type_ in wanted]),
            ends=tuple(map(self._end_of, stages)),
            sums=tuple((s, position, last.sharding(type_)) for s, position, type_ in wanted),
        )

    def _check_turns(self, stages: Sequence[Stage]) -> None:
        """A variable that the forward changes (a running mean) goes from microbatch to microbatch, in their order."""
        cells = self._plan.schedule.cells
        for s, stage in enumerate(stages):
            steps = [cells[s, Op.F, m][1] for m in range(self._plan.schedule.n_microbatches)]
            if steps != sorted(steps) and set(stage.changed) - set(self._local.counts):
                raise ParallelizeError(
                    f"TrainStep: stage {s} changes variables of the model in its forward (running statistics, random counts), and "
                    f"the schedule runs its microbatches out of order, at steps {steps}: the variables would follow the schedule. "
                    f"Give a schedule whose forwards of a stage go from microbatch 0 on, as the named ones do."
                )

    def _end_of(self, stage: Stage) -> Callable[..., Any]:
        params = stage.code.params
        end = GradientsOfStage(
            self._local.sums.of(params), self._local, tuple(self._local.rest_axes[i] for i in stage.changed)
        )
        return end.compiled(stage)

    def _place(self, codes: Sequence[StageCode]) -> None:
        """Move every parameter, variable and piece of optimizer state to the devices of the stage that owns it."""
        params, rest = self._model.values()
        num_params = len(params)
        self._owners = Owners(
            tuple(_first_user(codes, i, lambda code: code.params) for i in range(num_params)),
            tuple(_first_user(codes, num_params + i, lambda code: code.others) for i in range(len(rest))),
        )
        params = list(map(self._put, params, self._trace.params, self._owners.params))
        rest = list(map(self._put, rest, self._trace.rest, self._owners.rest))
        self._model.assign(params, rest)
        clip = self._parts.clip
        self._optimizer = StageOptimizer(
            self._model,
            self._parts.optimizer,
            self._owners.params,
            self._meshes,
            self._plan.axis,
            clip=None if clip is None else (clip[0], Norm(clip[1])),
            donate=self._donate,
        )

    def _put(self, x: Any, spec: PartitionSpec, stage: int) -> Any:
        return jax.device_put(x, NamedSharding(self._meshes[stage], spec))

    # Every step

    def _step(self, compiled: Compiled, batch: Leaves) -> dict[str, PyTree]:
        assert self._optimizer is not None
        params, rest = self._model.values()
        arrays = [self._arrays(s, stage, params, rest, batch) for s, stage in enumerate(compiled.stages)]
        counts = [
            frozenset(place for place, i in enumerate(stage.changed) if i in self._local.counts)
            for stage in compiled.stages
        ]
        run_schedule(self._plan.schedule, compiled.stages, arrays, counts)
        sums = [jax.device_put(arrays[s].sums[position], sharding) for s, position, sharding in compiled.sums]
        metrics, scale = compiled.means(sums)
        grads, rest = self._gradients(compiled, arrays, scale, params, rest)
        self._model.assign(params, rest)
        return dict(metrics) | self._optimizer(grads)

    def _arrays(self, s: int, stage: Stage, params: Leaves, rest: Leaves, batch: Leaves) -> StageArrays:
        """What a stage begins with."""

        def variables(which: Sequence[int]) -> Leaves:
            return [self._copies.on(s, ("rest", i), rest[i], self._trace.rest[i]) for i in which]

        mine = [self._copies.on(s, i, params[i], self._trace.params[i]) for i in stage.code.params]
        sums, grads, changed = stage.start(mine, variables(stage.changed))
        rows = NamedSharding(stage.mesh, stage.kinds.batch)
        return StageArrays(
            params=mine,
            fixed=variables(stage.fixed),
            changed=changed,
            batch=[jax.device_put(batch[i], rows) for i in stage.arrays],
            sums=sums,
            grads=grads,
        )

    def _gradients(
        self, compiled: Compiled, arrays: Sequence[StageArrays], scale: Any, params: Leaves, rest: Leaves
    ) -> tuple[Leaves, Leaves]:
        """The gradient of every parameter and all other variables, on the stages that own them."""
        assert self._owners is not None
        grads: Leaves = [None] * len(params)
        rest = list(rest)
        for stage, a, end in zip(compiled.stages, arrays, compiled.ends, strict=True):
            here = jax.device_put(scale, NamedSharding(stage.mesh, PartitionSpec()))
            reduced, changed = end(a.params, a.grads, a.changed, here)
            for i, x in zip(stage.changed, changed, strict=True):
                rest[i] = self._put(x, self._trace.rest[i], self._owners.rest[i])
            for i, g in zip(stage.code.params, reduced, strict=True):
                g = self._put(g, self._trace.params[i], self._owners.params[i])
                grads[i] = g if grads[i] is None else grads[i] + g
        return [jnp.zeros_like(p) if g is None else g for g, p in zip(grads, params, strict=True)], rest


def _merge_marked(model: Variables, plan: PipelinePlan, params: Sequence[Any], rest: Sequence[Any]) -> Any:
    """The model, with the entries of its stages marked."""
    merged = model.merge(params, rest)
    mark_splits(merged, plan.splits, restart_order)
    return merged


def _first_user(codes: Sequence[StageCode], i: int, uses: Callable[[StageCode], tuple[int, ...]]) -> int:
    """The first stage that uses an input of the whole program; the first of all if none does."""
    return next((s for s, code in enumerate(codes) if i in uses(code)), 0)
