"""`LocalSGDStep`: replicas train by themselves for some steps, and are averaged then.

period 3      local, local, local + average, local, local, local + average, ...
every step    what moves within a replica (gradients over the axes that are not averaged), and one all-reduce for metrics
average       one all-reduce per bucket of parameters, over the axes along which replicas lie; then the outer optimizer
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._pytree import PyTree
from jaxpar._spec import entries
from jaxpar.ddp._module import put_on_mesh
from jaxpar.mesh import MeshLike
from jaxpar.mesh._process_group import raise_if_worker_lost
from jaxpar.pp import plan_of
from jaxpar.train._average import Average
from jaxpar.train._fused import FusedStep
from jaxpar.train._local import LocalStep
from jaxpar.train._parts import Parts
from jaxpar.train._replicas import Replicas, without
from jaxpar.train._step import TrainStep
from jaxpar.train._variables import Variables
from jaxpar_launch.flight import heartbeat


class ReplicaState(nnx.Module):
    """What a `LocalSGDStep` has beside the model and the optimizer; save it with them.

    Args:
        model: the model's variables, of all replicas: f32[R, ...].
        outer: the outer optimizer; None: there is none.
    """

    def __init__(self, model: nnx.Module, outer: nnx.Optimizer | None) -> None:
        self.model = model
        self.outer = outer
        self.num_steps = nnx.Variable(0)


class LocalSGDStep:
    """A training step of replicas that differ: each takes steps of its own, and every `period` steps all become their mean.

    A replica is what lies at one place along the averaged axes. In it a step is that of `TrainStep` with its part of the batch:
    gradients are summed over the batch axes that are not averaged, parameters may be sharded over them (`fully_shard`) or over
    others (`parallelize_module`). Over the averaged axes moves: in every step one small all-reduce for the metrics; in a step
    that averages one all-reduce per bucket of parameters and floating buffers. Two programs are compiled, and one more for every
    level of a hierarchy.

    `model` holds the last average: evaluate and export it as any model. From now on `optimizer` holds the states of all replicas:
    its arrays have a dim 0 for them, as those of `step.state` have, which is the rest of what a checkpoint needs:
    `manager.save(i, model, optimizer, extra={"replicas": step.state})`, and `restore` in the same way, for as many replicas.

    With period 1 and SGD it equals `TrainStep`. To warm up with gradients that are averaged, train with a `TrainStep` first, and
    build this one from the same model and optimizer then.

    Args:
        loss_fn: as for `TrainStep`; each replica takes the mean over its own part of the batch.
        model: as for `TrainStep`, without a pipeline. All replicas begin with its values.
        optimizer: `nnx.Optimizer(model, tx, wrt=nnx.Param)`: the inner optimizer. All replicas begin with its state. A `tx` that
            looks at the loss gets the mean of the replicas'.
        mesh: the mesh of the whole job.
        period: after how many steps replicas are averaged: over all batch axes; or by axis: `{"node": 16}` averages over `node`
            after 16 steps, and sums gradients over the other batch axes in every step; `{"node": 16, "gpu": 4}` averages
            over `gpu` after 4 steps and over both after 16.
        batch_axes: mesh axes over which dim 0 of every array of the batch is split. Default: the mesh's only axis.
        outer: an optimizer for the averages (DiLoCo: `optax.sgd(0.7, momentum=0.9, nesterov=True)`). Its gradient is the average
            before minus the mean of the replicas. None: the mean is taken as it is, as with `optax.sgd(1.0)`.
        accumulate: number of microbatches per step.
        clip_norm: largest norm of a replica's gradient to let through; the metrics' `grad_norm` is the mean of the replicas'.
        donate: reuse the buffers of all arrays.

    Raises:
        ParallelizeError: a period or axis that has no meaning, or a model that is sharded over an averaged axis or pipelined.
        BatchError: (on a step) as for `TrainStep`.

    Source: `PostLocalSGDOptimizer`, `PeriodicModelAverager`, `HierarchicalModelAverager`, `post_localSGD_hook` (rows O3, P34);
    DiLoCo, arXiv 2311.08105.

    Example:
        >>> import jax.numpy as jnp, jaxpar, optax
        >>> from flax import nnx
        >>> from jaxpar.train import LocalSGDStep
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        >>> mesh = jaxpar.init_device_mesh((8,), ("dp",))
        >>> step = LocalSGDStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh, period=4)
        >>> losses = [float(step(jnp.ones((16, 2)))["loss"]) for _ in range(8)]
        >>> losses[-1] < 0.5 * losses[0] or losses[0] < 1e-3
        True
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any],
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *,
        mesh: MeshLike,
        period: int | Mapping[str, int],
        batch_axes: str | Sequence[str] | None = None,
        outer: optax.GradientTransformation | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        donate: bool = True,
    ) -> None:
        if plan_of(model) is not None:
            raise ParallelizeError(
                "LocalSGDStep: the model was given to jaxpar.pp.pipeline, whose stages have no replicas to average. Train it with "
                "TrainStep, or leave the pipeline out."
            )
        self._whole = TrainStep(
            loss_fn,
            model,
            optimizer,
            mesh=mesh,
            batch_axes=batch_axes,
            accumulate=accumulate,
            clip_norm=clip_norm,
            donate=donate,
        )
        parts = self._whole._parts
        self._period = _periods(period, parts.batch_axes)
        axes = tuple(self._period)
        _check_whole(parts, axes)
        values = parts.model.values()
        is_own = [bool(jax.numpy.issubdtype(x.dtype, jax.numpy.floating)) for x in values[1]]
        replicas = Replicas(parts.mesh, axes, tuple(is_own))
        copies = parts.model.merge(replicas.stacked(values[0]), replicas.stacked(values[1], replicas.is_own))
        parts.optimizer.assign(*(replicas.stacked(x) for x in parts.optimizer.values()))
        outer_optimizer = None if outer is None else nnx.Optimizer(model, outer, wrt=optimizer.wrt)
        if outer_optimizer is not None:
            put_on_mesh(outer_optimizer, mesh)
        self.state = ReplicaState(copies, outer_optimizer)
        self._average = Average(
            replicas=replicas,
            model=parts.model,
            copies=Variables.of(copies, optimizer.wrt),
            outer=None if outer_optimizer is None else Variables.of(outer_optimizer, nnx.OptState),
            reduction=parts.local.sums.reduction,
            donate=donate,
        )
        self._engine = FusedStep(_lifted(parts, replicas, self._average.copies), donate=donate)
        self._programs: dict[tuple[str, ...], Callable[[], None]] = {}

    def __call__(self, batch: PyTree) -> dict[str, PyTree]:
        """Runs one step of all replicas, and averages them if it is time.

        Args:
            batch: as for `TrainStep`: of all replicas.

        Returns:
            `loss`, `grad_norm` if clipping, and the loss function's metrics: the mean of the replicas', which is that of the batch if
            their parts of it are of equal weight.

        Raises:
            BatchError: dim 0 does not divide into the ranks and microbatches, or the loss is no scalar.
        """
        num_steps = self.state.num_steps.get_value() + 1
        heartbeat(f"LocalSGDStep: step {num_steps} of this training")
        raise_if_worker_lost()
        metrics = self._engine(batch)
        self.state.num_steps.set_value(num_steps)
        due = tuple(axis for axis, period in self._period.items() if num_steps % period == 0)
        if due:
            self._average_over(due)
        return metrics

    def sync(self) -> None:
        """Averages all replicas now, out of turn: `model` holds what they have learnt until this step.

        An outer optimizer takes a step. After the last step of a training, or before an evaluation between two averages.
        """
        self._average_over(tuple(self._period))

    def evaluate(self, batch: PyTree) -> dict[str, PyTree]:
        """The metrics of a batch, of the last average: as `TrainStep.evaluate`."""
        return self._whole.evaluate(batch)

    def lower(self, batch: PyTree) -> jax.stages.Lowered:
        """Lowers a local step for a batch without running it."""
        return self._engine.lower(batch)

    def lower_average(self) -> jax.stages.Lowered:
        """Lowers the program that averages all replicas, without running it."""
        return self._average.program_over_all().lower(*self._average.arguments())

    def _average_over(self, axes: tuple[str, ...]) -> None:
        if axes not in self._programs:
            is_whole = set(axes) == set(self._period)
            self._programs[axes] = self._average.over_all() if is_whole else self._average.over(axes)
        self._programs[axes]()


def _periods(period: int | Mapping[str, int], batch_axes: tuple[str, ...]) -> dict[str, int]:
    """By axis, in the order of the batch axes."""
    by_axis = dict(period) if isinstance(period, Mapping) else dict.fromkeys(batch_axes, period)
    unknown = [axis for axis in by_axis if axis not in batch_axes]
    if unknown or not by_axis:
        raise ParallelizeError(
            f"LocalSGDStep: period={period} names {unknown or 'no axis'}, but replicas lie along axes that split the batch: "
            f"batch_axes={batch_axes}. Write period={{{batch_axes[0]!r}: 8}}, or period=8 for all of them."
            if batch_axes
            else f"LocalSGDStep: {period=}, but batch_axes=(): there are no replicas to average. Name the axes that split the batch."
        )
    for axis, steps in by_axis.items():
        if steps < 1 or max(by_axis.values()) % steps:
            raise ParallelizeError(
                f"LocalSGDStep: period={period}: {axis!r} is averaged after {steps} steps; it must be at least 1, and divide the longest "
                f"period ({max(by_axis.values())}), in whose step all are averaged. Write period={{{axis!r}: {max(steps, 1)}}}."
            )
    return {axis: by_axis[axis] for axis in batch_axes if axis in by_axis}


def _check_whole(parts: Parts, axes: tuple[str, ...]) -> None:
    """Each replica has all of the model.

    Raises:
        ParallelizeError: an array is sharded over an axis along which replicas lie, optimizer state alone over any, or a hook keeps
            state.
    """
    named: list[tuple[str, Any]] = [*zip(parts.model.chosen_names, parts.model.values()[0], strict=True)]
    named += zip(parts.model.rest_names, parts.model.values()[1], strict=True)
    named += [("the optimizer's state", x) for x in sum(parts.optimizer.values(), [])]
    for name, x in named:
        for names in entries(x.sharding.spec, x.ndim):
            if set(names) & set(axes):
                raise ParallelizeError(
                    f"LocalSGDStep: {name} is sharded over {names}, and replicas that differ lie along {axes}: each of them needs all of the "
                    f"model. Shard it over another axis, and name only the others in period={{...}}."
                )
    if any(parts.cuts):
        raise ParallelizeError(
            "LocalSGDStep: the optimizer's state is sharded and its parameters are not (shard_optimizer_state). Shard both: "
            "jaxpar.fsdp.fully_shard(model, mesh[...]), over an axis that is not averaged."
        )
    states = parts.local.sums.reduction.init_states(parts.model.values()[0])
    if jax.tree.leaves(states):
        raise ParallelizeError(
            "LocalSGDStep: the hook of DistributedDataParallel keeps state from step to step, of which replicas would need one each. Take a "
            "stateless one, such as comm_hook=jaxpar.ddp.bf16_compress_hook."
        )


def _lifted(parts: Parts, replicas: Replicas, copies: Variables) -> Parts:
    """The step of all replicas, made of that of one model: nothing is summed over their axes."""
    local: LocalStep = parts.local
    axes = without(local.axes, replicas.axes)
    sums = dataclasses.replace(
        local.sums, axes=tuple(without(over, replicas.axes) for over in local.sums.axes)
    )
    one = dataclasses.replace(
        local,
        merge=copies.merge,
        split=copies.rest_of,
        sums=sums,
        rest_axes=tuple(
            without(over, replicas.axes) if is_own else over
            for over, is_own in zip(local.rest_axes, replicas.is_own, strict=True)
        ),
        axes=axes,
        num_ranks=local.num_ranks // replicas.num,
        replicas=replicas.live,
    )
    options = f"{parts.options}, replicas along {replicas.axes}"
    return dataclasses.replace(parts, model=copies, local=one, options=options, replicas=replicas)
