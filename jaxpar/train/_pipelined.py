"""A pipelined step: the loss is traced and cut once per batch shape, the schedule walked in every step.

    first call      trace -> stages -> parameters and optimizer state move to the devices of their stage
    every call      start -> schedule (F, B, I, W) -> losses, 1 / count -> gradients reduced, clipped -> optimizer, per stage

Inside a stage everything is as without a pipeline: the same forward, the same gradient sums, the same optimizer. A parameter
that several stages use (tied weights) belongs to the first of them: gradients are added there, the updated value is copied.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar._errors import ParallelizeError
from jaxpar._pytree import PyTree
from jaxpar.fsdp._order import restart_order
from jaxpar.mesh import assert_same_everywhere, warm_up
from jaxpar.pp import Costs, PipelinePlan, Schedule, Timeline
from jaxpar.pp._dealt import num_larger
from jaxpar.pp._measure import measure
from jaxpar.pp._place import Copies, restricted, spec_on_stage, stage_mesh
from jaxpar.pp._ranks import Ranks
from jaxpar.pp._record import record
from jaxpar.pp._schedule._action import Op
from jaxpar.pp._schedule._measured import measured_timeline
from jaxpar.pp._shapes import stage_meshes
from jaxpar.pp._split_points import mark_splits
from jaxpar.pp._spmd._run import OneProgram
from jaxpar.pp._stage import Stage
from jaxpar.pp._transport._choose import transport_between
from jaxpar.pp._walk import Smaller, StageArrays, Watch, run_schedule
from jaxpar.train._check_shapes import check_rows_of_ranks
from jaxpar.train._checks import check_alike, check_pipelined
from jaxpar.train._clip import Norm
from jaxpar.train._one_program import one_program, refuse_unequal
from jaxpar.train._parts import Parts, check_dealt_rows
from jaxpar.train._stage_batch import StageBatch
from jaxpar.train._stage_end import GradientsOfStage
from jaxpar.train._stage_homes import StageHomes
from jaxpar.train._stage_metrics import StageMetrics
from jaxpar.train._stage_optimizer import StageOptimizer
from jaxpar.train._stage_results import Owners, StageResults
from jaxpar.train._stage_shapes import fit_records, num_ranks, stages_of, traced_by_rank, traces_of_ranks
from jaxpar.train._stage_trace import LossTrace, Traced
from jaxpar.train._stage_units import units_of_stage
from jaxpar.train._variables import Variables

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class Compiled:
    """What is known for one shape of the batch.

    Args:
        stages: the programs of each stage.
        ends: for each stage, gradients from their sums.
        gathers: for each stage, whole parameters from those stored; None: its units gather in each microbatch.
        smaller: the same programs for microbatches with one row less, if there are some.
        metrics: sums of all stages to metrics, on every rank.
        borrowed: for each stage, the parameters and other variables that it uses and another rank owns.
        program: the schedule as one program, if that is how it runs.
    """

    stages: tuple[Stage, ...]
    smaller: Smaller | None
    ends: tuple[Callable[..., Any], ...]
    gathers: tuple[Callable[..., Any] | None, ...]
    metrics: StageMetrics
    borrowed: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    program: OneProgram | None


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
        meshes = stage_meshes(parts.mesh, plan.axis, plan.shapes)
        self._ranks = Ranks(meshes, plan.schedule.rank_of_stage, transport_between(meshes, plan.transport))
        self._n_microbatches = self._local.accumulate * plan.schedule.n_microbatches
        self._batch = StageBatch(parts.mesh, self._local.positions.rows, self._n_microbatches)
        params, rest = self._model.values()
        self._specs = tuple(tuple(spec_on_stage(x, plan.axis, meshes) for x in xs) for xs in (params, rest))
        trace = LossTrace(
            local=self._local,
            mesh=stage_mesh(parts.mesh, plan.axis, 0),
            params=self._specs[0],
            rest=self._specs[1],
            n_stages=plan.schedule.n_stages,
            n_microbatches=self._n_microbatches,
            remat=plan.remat,
        )
        self._traces = traces_of_ranks(trace, meshes)
        self._copies = Copies(self._ranks)
        self._compiled: dict[Any, Compiled] = {}
        self._owners: Owners | None = None
        self._results: StageResults | None = None
        self._homes: StageHomes | None = None
        self._optimizer: StageOptimizer | None = None

    def __call__(self, batch: PyTree) -> dict[str, PyTree]:
        """Runs one step."""
        leaves, treedef = jax.tree.flatten(batch)
        compiled = self._compiled_for(leaves, treedef)
        metrics = self._step(compiled, leaves)
        self._ranks.transport.wait()
        return metrics

    def evaluate(self, batch: PyTree, model: Variables) -> dict[str, PyTree]:
        """Metrics of the model in the mode in which its variables were listed; stages run forward only."""
        leaves, treedef = jax.tree.flatten(batch)
        if self._owners is None:
            self._compiled_for(leaves, treedef)  # what a step uses says on which stage everything lies
        compiled = self._compiled_for(leaves, treedef, model)
        sums = self._run(_forwards(self._plan.schedule), compiled, self._arrays(compiled, leaves))
        metrics, *_ = compiled.metrics(sums)
        self._ranks.transport.wait()
        return dict(metrics)

    def lower(self, batch: PyTree) -> jax.stages.Lowered:
        """The schedule's program, forward to sums of gradients, if it is one; nothing is placed."""
        if self._plan.executor == "mpmd":
            raise ParallelizeError(
                "TrainStep.lower: a pipelined step is not one program but several for each stage. Lower the step of the model "
                'without pipeline(...), look at the plan: simulate(plan_of(model).schedule), or give pipeline(executor="spmd"), '
                "whose schedule is one program."
            )
        leaves, treedef = jax.tree.flatten(batch)
        is_global = all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        shapes = leaves if is_global else self._batch.shapes(leaves)
        program = self._one_program(shapes, treedef)
        return program.lower(self._plan.schedule, self._counts(program.stages))

    def measure(self, batch: PyTree, *, repeats: int) -> Costs:
        """Times the programs of each stage, alone; nothing is trained."""
        leaves, treedef = jax.tree.flatten(batch)
        compiled = self._compiled_for(leaves, treedef)
        return measure(compiled.stages, self._arrays(compiled, leaves), self._ranks, repeats=repeats)

    def trace(self, batch: PyTree, *, repeats: int) -> Timeline:
        """When each action of one run of the schedule began and ended; nothing is trained."""
        leaves, treedef = jax.tree.flatten(batch)
        compiled = self._compiled_for(leaves, treedef)
        costs = self.measure(batch, repeats=repeats)
        schedule = self._plan.schedule
        times = {}
        for _ in range(2):  # the first one compiles
            arrays = jax.block_until_ready(self._arrays(compiled, leaves))
            times = record(
                lambda watch, arrays=arrays: self._run(schedule, compiled, arrays, rounds=1, watch=watch),
                self._ranks,
            )
            self._ranks.transport.wait()
        return measured_timeline(schedule, costs, times)

    # Once per shape of the batch

    def _compiled_for(self, leaves: Leaves, treedef: Any, evaluated: Variables | None = None) -> Compiled:
        """For a shape of the batch: the programs of a step, or those that evaluate a model in a mode."""
        mode = None if evaluated is None else evaluated.graphdef
        key = (mode, treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves))
        if key not in self._compiled:
            traces = self._traces if evaluated is None else self._evaluation_of(evaluated)
            self._compiled[key] = self._compile(traces, self._batch.shapes(leaves), treedef)
        return self._compiled[key]

    def _evaluation_of(self, model: Variables) -> tuple[LossTrace, ...]:
        merge = functools.partial(_merge_marked, model, self._plan)
        forward = {
            trace: dataclasses.replace(
                trace,
                local=dataclasses.replace(trace.local, merge=merge, split=model.rest_of),
                is_forward_only=True,
            )
            for trace in dict.fromkeys(self._traces)
        }
        return tuple(forward[trace] for trace in self._traces)

    def _compile(
        self, traces: Sequence[LossTrace], batch: Sequence[jax.ShapeDtypeStruct], treedef: Any
    ) -> Compiled:
        self._meet(batch)
        n_microbatches, is_forward_only = self._n_microbatches, traces[0].is_forward_only
        num_parts = num_ranks(self._parts.mesh, self._parts.batch_axes)
        named = jax.tree.unflatten(treedef, batch)
        num_rows = check_dealt_rows(named, num_parts, n_microbatches, self._parts.batch_axes)
        nums = [num_ranks(mesh, self._local.positions.rows) for mesh in self._ranks.meshes]
        check_rows_of_ranks(batch, nums, n_microbatches)
        if self._plan.executor == "spmd":
            refuse_unequal(num_rows, n_microbatches, num_parts)
        traced, stages = self._stages(traces, batch, treedef)
        smaller, first = None, num_larger(num_rows, n_microbatches)
        if first:
            smaller = Smaller(self._stages(traces, batch, treedef, is_smaller=True)[1], first)
            check_alike(stages, smaller.stages)
        self._check_turns(stages)
        locals_ = [trace.local for trace in traces]
        metrics = StageMetrics.of(stages, traced.means, locals_, self._ranks, n_microbatches)
        if self._owners is None:
            self._place(stages, metrics.loss_type)
        return Compiled(
            stages=stages,
            smaller=smaller,
            ends=() if is_forward_only else tuple(map(self._end_of, range(len(stages)), stages)),
            gathers=tuple(map(self._gather_of, stages)),
            metrics=metrics,
            borrowed=tuple(map(self._borrowed, range(len(stages)), stages)),
            program=None
            if self._plan.executor == "mpmd" or is_forward_only
            else self._one_program(batch, treedef),
        )

    def _one_program(self, batch: Sequence[jax.ShapeDtypeStruct], treedef: Any) -> OneProgram:
        mesh, axis = self._parts.mesh, self._plan.axis
        meshes = [*map(self._ranks.mesh_of, range(self._plan.schedule.n_stages))]
        return one_program(self._traces[0], meshes, mesh, axis, *self._model.values(), batch, treedef)

    def _stages(
        self,
        traces: Sequence[LossTrace],
        batch: Sequence[jax.ShapeDtypeStruct],
        treedef: Any,
        *,
        is_smaller: bool = False,
    ) -> tuple[Traced, tuple[Stage, ...]]:
        traced = traced_by_rank(traces, *self._model.values(), batch, treedef, is_smaller=is_smaller)
        return traced[0], stages_of(traced, self._ranks, self._local.positions.rows)

    def _meet(self, batch: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Before a new shape: do all processes mean the same program, and are all there?"""
        if not self._ranks.is_spread:
            return
        mesh, schedule = self._parts.mesh, self._plan.schedule
        facts = {
            "mesh": f"{dict(mesh.shape)} over devices {[d.id for d in mesh.devices.flat]}",
            "batch": str([f"{x.dtype}{list(x.shape)}" for x in batch]),
            "options": self._parts.options,
            "splits": str(self._plan.splits),
            "executor": self._plan.executor,
            "schedule": str([[str(action) for action in row] for row in schedule.rows]),
        }
        assert_same_everywhere("a step of TrainStep for a new shape of the batch", facts)
        for rank in sorted(self._ranks.here):
            warm_up(self._ranks.meshes[rank])

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

    def _end_of(self, s: int, stage: Stage) -> Callable[..., Any]:
        params, local = stage.code.params, self._traces[self._ranks.of_stage[s]].local
        end = GradientsOfStage(
            local.sums.of(params),
            local,
            tuple(local.rest_axes[i] for i in stage.changed),
            units_of_stage(local.units, local.sums, params),
        )
        return end.compiled(stage)

    def _gather_of(self, stage: Stage) -> Callable[..., Any] | None:
        units = units_of_stage(self._local.units, self._local.sums, stage.code.params)
        return None if units is None else units.gathering(stage)

    def _place(self, stages: Sequence[Stage], loss: jax.ShapeDtypeStruct) -> None:
        """Move every parameter, variable and piece of optimizer state to the devices of the stage that owns it."""
        params, rest = (list(map(_on_a_device, xs)) for xs in self._model.values())
        self._owners = owners = Owners(
            tuple(_first_user(stages, i, lambda stage: stage.code.params) for i in range(len(params))),
            tuple(
                _first_user(stages, i, lambda stage: (*stage.rest, *stage.changed)) for i in range(len(rest))
            ),
        )
        names = self._model.chosen_names
        of_params, of_rest = self._specs
        self._results = StageResults(self._ranks, owners, self._copies, of_params, names)
        own_params = list(map(self._put, params, of_params, owners.params))
        own_rest = list(map(self._put, rest, of_rest, owners.rest))
        self._model.assign(own_params, own_rest)
        self._homes = StageHomes((*names, *self._model.rest_names), [*own_params, *own_rest])
        borrowed_params: set[int] = set()
        for s, stage in enumerate(stages):
            lent_params, lent_rest = self._borrowed(s, stage)
            borrowed_params |= set(lent_params)
            rank = self._ranks.of_stage[s]
            for i in lent_params:
                self._copies.keep(rank, i, own_params[i], self._put(params[i], of_params[i], s))
            for i in lent_rest:
                self._copies.keep(rank, ("rest", i), own_rest[i], self._put(rest[i], of_rest[i], s))
        self._optimizer = StageOptimizer(
            self._model,
            self._parts.optimizer,
            owners.params,
            self._ranks,
            self._plan.axis,
            clip=None if self._parts.clip is None else (self._parts.clip[0], Norm(self._parts.clip[1])),
            borrowed=frozenset(borrowed_params),
            loss=loss,
            donate=self._donate,
        )

    def _put(self, x: Any, spec: PartitionSpec, stage: int) -> Any:
        return restricted(x, NamedSharding(self._ranks.mesh_of(stage), spec))

    def _borrowed(self, s: int, stage: Stage) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Parameters and other variables that a stage uses, and a stage on another rank owns."""
        assert self._owners is not None
        of_stage, owners = self._ranks.of_stage, self._owners
        return (
            tuple(i for i in stage.code.params if of_stage[owners.params[i]] != of_stage[s]),
            tuple(i for i in stage.rest if of_stage[owners.rest[i]] != of_stage[s]),
        )

    # Every step

    def _step(self, compiled: Compiled, batch: Leaves) -> dict[str, PyTree]:
        assert self._optimizer is not None and self._homes is not None
        arrays = self._arrays(compiled, batch)
        sums = self._run(self._plan.schedule, compiled, arrays)
        is_loss_wanted = self._optimizer.is_loss_wanted
        metrics, scale_on, losses = compiled.metrics(sums, is_loss_wanted=is_loss_wanted)
        params, rest = self._model.values()
        grads, rest = self._gradients(compiled, arrays, scale_on, params, rest)
        self._model.assign(params, rest)
        norms, params = self._optimizer(grads, losses)
        self._homes.know([*params, *rest])
        return dict(metrics) | norms

    def _run(
        self,
        schedule: Schedule,
        compiled: Compiled,
        arrays: Sequence[StageArrays | None],
        *,
        rounds: int | None = None,
        watch: Watch | None = None,
    ) -> list[Leaves | None]:
        """Runs the schedule; returns the sums of losses and metrics of each stage that is here.

        What is watched is walked, whatever the executor: a program's actions cannot be seen from outside.
        """
        counts = self._counts(compiled.stages)
        if compiled.program is not None and watch is None:
            # Messages and the program may meet in one clique of devices, which knows them by their order alone.
            is_shared = self._ranks.is_spread
            if is_shared:
                self._ranks.transport.wait()
            compiled.program(schedule, arrays, counts)
            if is_shared:
                made = [x for a in arrays if a is not None for x in (*a.sums, *a.grads, *a.changed)]
                self._ranks.transport.wait(made)
        else:
            run_schedule(
                schedule,
                compiled.stages,
                arrays,
                counts,
                self._ranks,
                rounds=rounds or self._local.accumulate,
                smaller=compiled.smaller,
                watch=watch,
            )
        return [None if a is None else a.sums for a in arrays]

    def _counts(self, stages: Sequence[Stage]) -> list[frozenset[int]]:
        """For each stage, which of its changed variables every microbatch starts anew with."""
        return [
            frozenset(place for place, i in enumerate(stage.changed) if i in self._local.counts)
            for stage in stages
        ]

    def _arrays(self, compiled: Compiled, batch: Leaves) -> list[StageArrays | None]:
        """What the stages that are here begin with."""
        assert self._homes is not None
        params, rest = self._model.values()
        if not self._homes.are_known([*params, *rest]):
            home = self._homes.home([*params, *rest])
            params, rest = home[: len(params)], home[len(params) :]
            self._model.assign(params, rest)
        arrays: list[StageArrays | None] = []
        for s, stage in enumerate(compiled.stages):
            rank, (_, of_rest) = self._ranks.of_stage[s], compiled.borrowed[s]
            mine = self._stored(s, compiled, params)
            lent_rest = {i: self._copies.on(rank, ("rest", i), rest[i], self._specs[1][i]) for i in of_rest}
            if rank not in self._ranks.here:
                arrays.append(None)
                continue
            gather = compiled.gathers[s]
            mine = mine if gather is None else gather(mine)
            sums, grads, changed = stage.start(mine, [lent_rest.get(i, rest[i]) for i in stage.changed])
            fixed = [lent_rest.get(i, rest[i]) for i in stage.fixed]
            rows = [self._batch.on(stage.mesh, batch[i]) for i in stage.arrays]
            arrays.append(StageArrays(mine, fixed, changed, rows, sums, grads))
        return arrays

    def _stored(self, s: int, compiled: Compiled, params: Leaves) -> Leaves:
        """The parameters that a stage uses, as they are stored; what another rank owns is fetched once in a step."""
        rank, (borrowed, _) = self._ranks.of_stage[s], compiled.borrowed[s]
        lent = {i: self._copies.on(rank, i, params[i], self._specs[0][i]) for i in borrowed}
        return [lent.get(i, params[i]) for i in compiled.stages[s].code.params]

    def _gradients(
        self,
        compiled: Compiled,
        arrays: Sequence[StageArrays | None],
        scale_on: Mapping[int, Any],
        params: Leaves,
        rest: Leaves,
    ) -> tuple[Leaves, Leaves]:
        """The gradient of every parameter and all other variables, on the stages that own them, if those are here."""
        assert self._results is not None
        ends: list[tuple[Leaves, Leaves] | None] = []
        for s, (a, end) in enumerate(zip(arrays, compiled.ends, strict=True)):
            stored = self._stored(s, compiled, params)
            scale = scale_on.get(self._ranks.of_stage[s])
            ends.append(None if a is None else end(stored, a.grads, a.changed, scale))
        borrowed = [of_params for of_params, _ in compiled.borrowed]
        return (
            self._results.gradients(compiled.stages, borrowed, [end and end[0] for end in ends], params),
            self._results.variables(compiled.stages, [end and end[1] for end in ends], rest),
        )


def _on_a_device(x: Any) -> jax.Array:
    """What a user assigned before the first step may be of NumPy."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _merge_marked(model: Variables, plan: PipelinePlan, params: Sequence[Any], rest: Sequence[Any]) -> Any:
    """The model, with the entries of its stages marked."""
    merged = model.merge(params, rest)
    if plan.shapes:
        fit_records(merged)
    mark_splits(merged, plan.splits, restart_order)
    return merged


@functools.lru_cache(maxsize=8)
def _forwards(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, in its order."""
    rows = [[part for a in row if a for part in a.parts if part.op is Op.F] for row in schedule.rows]
    return Schedule(rows, schedule.rank_of_stage)


def _first_user(stages: Sequence[Stage], i: int, uses: Callable[[Stage], tuple[int, ...]]) -> int:
    """The first stage that uses or changes a variable; the first of all if none does."""
    return next((s for s, stage in enumerate(stages) if i in uses(stage)), 0)
