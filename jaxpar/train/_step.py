"""`TrainStep`: what a step is made of, and which engine runs it.

model                        engine
any                          `FusedStep`: one jitted program for the whole mesh
given to `pipeline`          `PipelinedStep`: a few programs for each stage, in the order of a schedule
"""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._pytree import PyTree
from jaxpar._record import partial_axes
from jaxpar.ddp._module import CONFIG, DDPConfig, put_on_mesh
from jaxpar.ddp._reduce import Reduction
from jaxpar.fsdp._abstract_state import follow_parameters
from jaxpar.fsdp._follows import check_optimizer_follows
from jaxpar.fsdp._whole import Units
from jaxpar.fsdp._zero1 import cuts_of
from jaxpar.mesh import MeshLike, as_jax_mesh, axes_of
from jaxpar.mesh._flat_buffers import default_flatten_below_bytes
from jaxpar.mesh._process_group import raise_if_worker_lost
from jaxpar.pp import Costs, PipelinePlan, Timeline, plan_of, simulate
from jaxpar.pp._place import onto_whole_mesh
from jaxpar.pp._schedule._render._beside import check_trace_path, render_beside
from jaxpar.pp._shapes import largest_sizes
from jaxpar.train._check_shapes import check_shapes
from jaxpar.train._checks import check_cuts, check_plan, check_records, check_units
from jaxpar.train._dropout import Positions, own_counts
from jaxpar.train._fused import FusedStep
from jaxpar.train._local import LocalStep
from jaxpar.train._parts import Parts
from jaxpar.train._pipelined import PipelinedStep
from jaxpar.train._sums import GradientSums, slices_of
from jaxpar.train._variables import Variables
from jaxpar_launch.flight import heartbeat


class TrainStep:
    """One training step over a mesh: equal to the step on one device with the whole batch.

    `step(batch)` runs forward, backward, reduction, clipping and the optimizer in one compiled program, updates
    `model` and `optimizer` in place, and returns the metrics. One compilation per batch shape.

    What moves over `batch_axes`: one all-reduce for losses, metrics and buffers; one of a single number if clipping
    sharded gradients; and for a model in

        DistributedDataParallel, or in nothing    one all-reduce per bucket of gradients
        the same, `shard_optimizer_state`         reduce-scatters per bucket, all-gathers of the updated parameters
        fully_shard                               what its units gather and scatter

    A model that was given to `pipeline` runs stage by stage: its parameters and their optimizer state move to the devices of
    their stage in the first step, and over the pipeline's axis move activations and their gradients, copied from the devices
    of a stage to those of its neighbour. Within a stage moves what moves without a pipeline.

    Arrays in host memory (`CPUOffloadPolicy`, `offload_optimizer_state`) are copied to the device in the program and back.

    The model trains in the mode (`model.train()`) that it has when the `TrainStep` is built. Build a new one after
    changing the model's structure. Random keys: `nnx.Dropout` draws by position in the global batch; a key that the
    model uses in another way is the same on every rank, and another one in every microbatch.

    Args:
        loss_fn: `loss_fn(model, batch)` with this device's part of the batch returns a scalar (the mean over its
            examples), or `jaxpar.Mean(total, count)`, or `(that, metrics)` where metrics is a dict of arrays and
            `Mean`s. Parts are averaged (`Mean`: total over count) over ranks and microbatches.
        model: a Flax NNX module; what does not lie on the mesh yet is replicated.
        optimizer: `nnx.Optimizer(model, tx, wrt=nnx.Param)`; what its `wrt` selects is trained. A `tx` that takes more than
            gradients (`optax.contrib.reduce_on_plateau`) gets the step's loss as `value`.
        mesh: the mesh of the whole job, `DeviceMesh` or `jax.sharding.Mesh`.
        batch_axes: mesh axes over which dim 0 of every array of the batch is split. Default: the mesh's only axis.
        sequence_axes: mesh axes whose ranks share each row's sequence (context parallelism): all get the same rows, and
            `loss_fn` takes this rank's part of them (`jaxpar.cp.split_sequence`). Losses, metrics and gradients are summed
            over these axes as over `batch_axes`.
        accumulate: number of microbatches per step: gradients are summed locally, in fp32 at least, and reduced once.
            The units of `fully_shard` gather and scatter in every microbatch, and sum 1/N of the gradients. Of a pipelined
            model it is how often the schedule runs, on consecutive parts of the batch; gradients are reduced once after all.
        accumulate_unsharded: instead, gather all units once before the microbatches, sum whole gradients, and scatter
            them once (PyTorch's `set_requires_gradient_sync`, row F21): 1/n of the traffic, and on every device whole
            parameters and gradients; of a pipelined model on every device of a stage that stage's. Either way replicas
            (HSDP) are summed over once (row F22).
        clip_norm: largest global gradient norm to let through; the norm is then in the metrics as `grad_norm`.
        clip_norm_type: 1, 2 or `math.inf`.
        donate: reuse the buffers of parameters and optimizer state; arrays taken from the model before become
            invalid.

    Raises:
        ParallelizeError: unknown axes, nothing to train, or options that contradict the model's wrapping.
        BatchError: (on a step) the batch does not divide, or the loss is no scalar.

    Example:
        >>> import jax.numpy as jnp, jaxpar, optax
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        >>> mesh = jaxpar.init_device_mesh((8,), ("dp",))
        >>> step = jaxpar.TrainStep(lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(), model, optimizer, mesh=mesh)
        >>> losses = [float(step({"x": jnp.ones((16, 2)), "y": jnp.ones((16, 1))})["loss"]) for _ in range(20)]
        >>> losses[-1] < 0.01 * losses[0]
        True
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any],
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *,
        mesh: MeshLike,
        batch_axes: str | Sequence[str] | None = None,
        sequence_axes: str | Sequence[str] = (),
        accumulate: int = 1,
        accumulate_unsharded: bool = False,
        clip_norm: float | None = None,
        clip_norm_type: float = 2.0,
        donate: bool = True,
    ) -> None:
        self._mesh = as_jax_mesh(mesh)
        self._module = model
        plan = plan_of(model)
        self._batch_axes = _batch_axes(mesh, batch_axes, plan)
        self._axes = _with_sequence_axes(mesh, self._batch_axes, sequence_axes)
        if accumulate < 1:
            raise ParallelizeError(f"accumulate must be at least 1 microbatch per step, got {accumulate}.")
        config = _ddp_config(model, mesh, self._axes)
        check_units(model, self._axes)
        if plan is not None:
            check_plan(plan, self._mesh, self._axes)
            onto_whole_mesh(model, self._mesh, plan.axis)
            onto_whole_mesh(optimizer, self._mesh, plan.axis)
        check_records(model, self._mesh)
        put_on_mesh(model, self._mesh)
        follow_parameters(optimizer, model)
        put_on_mesh(optimizer, self._mesh)
        check_optimizer_follows(model, optimizer)
        self._sizes = dict(self._mesh.shape)
        if plan is not None:
            sequences = [axis for axis in self._axes if axis not in self._batch_axes]
            check_shapes(model, optimizer, plan, self._mesh, sequences, is_unsharded=accumulate_unsharded)
            self._sizes = largest_sizes(self._mesh, plan.axis, plan.shapes)
        self._model = Variables.of(model, optimizer.wrt)
        self._optimizer = Variables.of(optimizer, nnx.OptState)
        if not self._model.chosen:
            raise ParallelizeError(
                f"{type(model).__name__} has no variable that optimizer.wrt={optimizer.wrt} selects: nothing would be "
                f"trained. Build the optimizer with nnx.Optimizer(model, tx, wrt=nnx.Param)."
            )
        options = f"{batch_axes=}, {sequence_axes=}, {accumulate=}, {accumulate_unsharded=}, {clip_norm=}, {clip_norm_type=}, {donate=}"
        found = cuts_of(model, optimizer)
        cuts = tuple(found.get(id(variable)) for variable in self._model.chosen)
        check_cuts(self._model.chosen_names, cuts, self._axes, config.reduction)
        live = tuple(axis for axis in self._axes if self._sizes[axis] > 1)
        counts = own_counts(model)
        local = LocalStep(
            loss_fn=loss_fn,
            merge=self._model.merge,
            split=self._model.rest_of,
            sums=GradientSums(
                axes=tuple(self._summed_over(live, variable) for variable in self._model.chosen),
                slices=slices_of(cuts, live, config.reduction.flatten_below_bytes),
                reduction=config.reduction,
            ),
            rest_axes=tuple(_missing(live, x) for x in self._model.values()[1]),
            axes=live,
            positions=Positions(
                rows=tuple(axis for axis in live if axis in self._batch_axes),
                sequences=tuple(axis for axis in live if axis not in self._batch_axes),
                num_microbatches=accumulate * (1 if plan is None else plan.schedule.n_microbatches),
            ),
            counts=tuple(i for i, v in enumerate(self._model.rest) if id(v) in counts),
            num_ranks=math.prod(self._mesh.shape[axis] for axis in live),
            accumulate=accumulate,
            is_buffer_mean=config.sync_buffers == "mean",
            units=Units.of(model, self._model.variables) if accumulate_unsharded else None,
        )
        clip = None if clip_norm is None else (clip_norm, clip_norm_type)
        parts = Parts(self._mesh, self._model, self._optimizer, local, cuts, self._batch_axes, clip, options)
        self._parts, self._num_calls = parts, 0
        self._engine = (
            FusedStep(parts, donate=donate) if plan is None else PipelinedStep(plan, parts, donate=donate)
        )

    def __call__(self, batch: PyTree) -> dict[str, PyTree]:
        """Runs one step.

        Args:
            batch: pytree of arrays with the batch in dim 0: with one process the whole batch, with several this
                process's part; or global `jax.Array`s that are sharded already.

        Returns:
            `loss`, `grad_norm` if clipping, and the loss function's metrics: of the whole batch, equal on every
            process, computed asynchronously (`float(metrics["loss"])` waits).

        Raises:
            BatchError: dim 0 does not divide into the ranks and microbatches, or the loss is no scalar.
        """
        self._num_calls += 1
        heartbeat(f"TrainStep: step {self._num_calls} of this process")
        raise_if_worker_lost()
        return self._engine(batch)

    def evaluate(self, batch: PyTree) -> dict[str, PyTree]:
        """The metrics of a batch, without a step: nothing is trained, no variable changes, no gradient is computed.

        The model's mode at the time of the call counts: `model.eval()` switches dropout off and takes running statistics. A
        pipelined model runs its stages forward only, in the order of its schedule, and keeps no activation. One compilation
        for each mode and batch shape. Source: PyTorch's `schedule.eval` (parity PP6).

        Args:
            batch: as for a step, and it divides in the same way.

        Returns:
            `loss` and the loss function's metrics, as a step gives them.

        Raises:
            BatchError: as for a step.
            ParallelizeError: the model has other variables than when the `TrainStep` was built.

        Example:
            >>> import jax.numpy as jnp, jaxpar, optax
            >>> from flax import nnx
            >>> model = nnx.Sequential(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
            >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
            >>> mesh = jaxpar.init_device_mesh((8,), ("dp",))
            >>> step = jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh)
            >>> model.eval()
            >>> float(step.evaluate(jnp.zeros((16, 2)))["loss"])
            0.0
        """
        model = Variables.of(self._module, self._model.chosen_filter)
        if model.treedefs != self._model.treedefs:
            raise ParallelizeError(
                f"TrainStep.evaluate: {type(self._module).__name__} has other variables than when the TrainStep was built: "
                f"{len(model.variables)} now, {len(self._model.variables)} then. Build a new TrainStep after changing the model."
            )
        return self._engine.evaluate(batch, model)

    def lower(self, batch: PyTree) -> jax.stages.Lowered:
        """Lowers the step for a batch without running it: `step.lower(batch).compile()` to inspect the program.

        `batch` may hold `jax.ShapeDtypeStruct`s of global shape. A model and optimizer that are abstract too (as
        `nnx.eval_shape` makes them) are lowered without any array: for devices that are not here.
        """
        return self._engine.lower(batch)

    def block_until_ready(self) -> None:
        """Waits until parameters and optimizer state of the last step are there; to measure time, mostly."""
        jax.block_until_ready((self._model.values(), self._optimizer.values()))

    def measure(self, batch: PyTree, *, repeats: int = 5) -> Costs:
        """Times the stages of a pipelined model, each program alone: costs for `simulate` and `auto_schedule`.

        Nothing is trained, and the model is not changed. Times are seconds, memory is bytes on a device; both depend on the
        batch's shape. Each program keeps its stage's devices busy alone, so on one machine's cores stages that run at once
        may take longer.

        Args:
            batch: as for a step.
            repeats: how often each program runs; the median counts.

        Raises:
            ParallelizeError: the model was not given to `pipeline`.

        Example:
            >>> import jax, jaxpar, optax
            >>> from flax import nnx
            >>> mesh = jaxpar.init_device_mesh((2,), ("pp",), devices=jax.devices()[:2])
            >>> model = nnx.Sequential(*[nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2)])
            >>> model = jaxpar.pp.pipeline(model, mesh["pp"], n_stages=2, n_microbatches=2)
            >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
            >>> step = jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh)
            >>> costs = step.measure(jax.numpy.ones((8, 4)), repeats=1)
            >>> len(costs.F), costs.activation[0] > 0
            (2, True)
        """
        return self._engine.measure(batch, repeats=repeats)

    def trace(self, batch: PyTree, path: "str | os.PathLike[str]", *, repeats: int = 5) -> Timeline:
        """Writes when the actions of a pipelined step really run, next to what `simulate` makes of the measured costs.

        One run of the schedule is watched, as it is dispatched in every step; nothing is trained, and the model is not changed.
        `path` is a trace that Chrome and Perfetto open, with a process "measured" and one "simulated"; beside it lies a
        picture of both, `.svg`. A method and not an option, because waiting for each action costs: it shows the step that
        you ask for. Source: PyTorch's chrome trace of the pipeline's runtime.

        Args:
            batch: as for a step.
            path: ends in .json.
            repeats: as for `measure`.

        Returns:
            What was measured, in seconds; `simulate(timeline.schedule, timeline.costs)` is what was simulated.

        Raises:
            ParallelizeError: the model was not given to `pipeline`.
            ScheduleError: the path does not end in .json or lies in no folder, or matplotlib is not installed.

        Example:
            >>> import jax, jaxpar, optax, tempfile
            >>> from flax import nnx
            >>> mesh = jaxpar.init_device_mesh((2,), ("pp",), devices=jax.devices()[:2])
            >>> model = nnx.Sequential(*[nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2)])
            >>> model = jaxpar.pp.pipeline(model, mesh["pp"], n_stages=2, n_microbatches=2)
            >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
            >>> step = jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     timeline = step.trace(jax.numpy.ones((8, 4)), f"{folder}/pp.json", repeats=1)
            >>> [str(event.action) for event in timeline.events[1]]
            ['1F0', '1B0', '1F1', '1B1']
        """
        check_trace_path(Path(path))
        timeline = self._engine.trace(batch, repeats=repeats)
        if jax.process_index() == 0:
            simulated = simulate(timeline.schedule, timeline.costs)
            render_beside({"measured": timeline, "simulated": simulated}, Path(path))
        return timeline

    def _summed_over(self, live: tuple[str, ...], variable: nnx.Variable[Any]) -> tuple[str, ...]:
        """Axes over which the gradients of a parameter are terms of a sum; the step takes it in a bucket."""
        partial = (a for a in partial_axes(variable) if a not in live and self._sizes.get(a, 1) > 1)
        return (*_missing(live, variable.get_value()), *partial)


def _batch_axes(
    mesh: MeshLike, batch_axes: str | Sequence[str] | None, plan: PipelinePlan | None
) -> tuple[str, ...]:
    names = axes_of(mesh)
    if batch_axes is None:
        if plan is not None:
            names = tuple(name for name in names if name != plan.axis)
            if not names:
                return ()
        if len(names) != 1:
            raise ParallelizeError(
                f"the mesh has the axes {names}: say which of them split the batch, as in "
                f"TrainStep(..., mesh=mesh, batch_axes=({names[0]!r},))."
            )
        return names
    return _checked_axes("batch_axes", batch_axes, mesh)


def _checked_axes(option: str, names: str | Sequence[str], mesh: MeshLike) -> tuple[str, ...]:
    axes = (names,) if isinstance(names, str) else tuple(names)
    unknown = [axis for axis in axes if axis not in as_jax_mesh(mesh).axis_names]
    if unknown or len(set(axes)) != len(axes):
        raise ParallelizeError(
            f"{option}={axes}: {unknown[0]!r} is no axis of the mesh; it has {axes_of(mesh)}."
            if unknown
            else f"{option}={axes} names an axis twice."
        )
    return axes


def _with_sequence_axes(
    mesh: MeshLike, batch_axes: tuple[str, ...], sequence_axes: str | Sequence[str]
) -> tuple[str, ...]:
    """The axes over which the ranks' losses are parts of one."""
    axes = _checked_axes("sequence_axes", sequence_axes, mesh)
    twice = [axis for axis in axes if axis in batch_axes]
    if twice:
        raise ParallelizeError(
            f"TrainStep: {twice[0]!r} is in batch_axes={batch_axes} and in sequence_axes={axes}: its ranks have either rows of "
            f"their own or parts of the same rows. Remove it from one of them."
        )
    return (*batch_axes, *axes)


def _ddp_config(model: nnx.Module, mesh: MeshLike, axes: tuple[str, ...]) -> DDPConfig:
    config = getattr(type(model), CONFIG, None)
    if config is None:
        reduction = Reduction(flatten_below_bytes=default_flatten_below_bytes(mesh))
        return DDPConfig(axes=axes, reduction=reduction)
    if set(config.axes) != set(axes):
        raise ParallelizeError(
            f"the model was wrapped by DistributedDataParallel over the axes {config.axes}, but the step sums over {axes} (batch_axes, sequence_axes). "
            f"Gradients are averaged over the axes that split the batch. Write DistributedDataParallel(model, "
            f"mesh[{', '.join(map(repr, axes))}])."
        )
    return config


def _missing(axes: tuple[str, ...], x: Any) -> tuple[str, ...]:
    """The axes over which `x` is replicated."""
    used = {
        name for entry in x.sharding.spec for name in ((entry,) if isinstance(entry, str) else entry or ())
    }
    return tuple(axis for axis in axes if axis not in used)
