"""The step of a model that every device runs whole: one jitted program, explicit communication inside.

jit ------------------------------------------------------------------------------------------
|  shard_map over the mesh (check_vma)                          global view                   |
|  forward -> losses (1 all-reduce) -> backward, buckets  --->  clip -> optax -> new params   |
----------------------------------------------------------------------------------------------
"""

import collections
import dataclasses
import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar import _compat
from jaxpar._errors import ParallelizeError
from jaxpar._pytree import PyTree
from jaxpar.data import global_batch
from jaxpar.fsdp._offload import on_device
from jaxpar.mesh import assert_same_everywhere, warm_up
from jaxpar.pp import Costs, Timeline
from jaxpar.train._clip import clipping
from jaxpar.train._parts import Parts, check_rows, live_spec
from jaxpar.train._update import Update
from jaxpar.train._variables import Variables

# On CPU, programs queue on a small thread pool; more than this many steps in flight only cost memory (and,
# on jax 0.10.2 with two cores, more than 33 undrained collective programs deadlock).
MAX_STEPS_IN_FLIGHT_ON_CPU = 2


class FusedStep:
    """The engine of a `TrainStep` whose model is not pipelined; see there for what it does.

    Args:
        parts: what the step is made of.
        donate: whether buffers of parameters and optimizer state are used again.
    """

    def __init__(self, parts: Parts, *, donate: bool) -> None:
        self._mesh, self._batch_axes = parts.mesh, parts.batch_axes
        self._model, self._optimizer, self._local = parts.model, parts.optimizer, parts.local
        self._cuts, self._options, self._accumulate = parts.cuts, parts.options, parts.local.accumulate
        self._states = self._init_hook_states()
        self._jitted = self._build(parts, donate=donate)
        self._agreed = False
        self._evaluations: dict[Any, jax.stages.Wrapped] = {}
        self._in_flight: collections.deque[jax.Array] = collections.deque()

    def __call__(self, batch: PyTree) -> dict[str, PyTree]:
        """Runs one step."""
        arguments = self._arguments(batch)
        if not self._agreed:
            self._agreed = True
            self._agree("the first step of TrainStep", self._jitted, arguments)
        params, rest, chosen, other, self._states, metrics = self._jitted(*arguments)
        self._model.assign(params, rest)
        self._optimizer.assign(chosen, other)
        self._wait_for_old_steps(metrics["loss"])
        return metrics

    def evaluate(self, batch: PyTree, model: Variables) -> dict[str, PyTree]:
        """Metrics of the model in the mode in which its variables were listed; one program for each mode."""
        arguments = (*model.values(), self._global_batch(batch))
        if model.graphdef not in self._evaluations:
            program = self._evaluations[model.graphdef] = self._evaluation(model)
            self._agree("the first TrainStep.evaluate", program, arguments)
        metrics = self._evaluations[model.graphdef](*arguments)
        self._wait_for_old_steps(metrics["loss"])
        return metrics

    def lower(self, batch: PyTree) -> jax.stages.Lowered:
        """Lowers the step without running it."""
        return self._jitted.lower(*self._arguments(batch))

    def measure(self, batch: PyTree, *, repeats: int) -> Costs:
        """There are no stages to measure."""
        raise ParallelizeError(
            "TrainStep.measure: times the stages of a pipeline, and the model has none. Give it to "
            "jaxpar.pp.pipeline(model, mesh['pp'], ...) first."
        )

    def trace(self, batch: PyTree, *, repeats: int) -> Timeline:
        """There is no schedule to trace."""
        raise ParallelizeError(
            "TrainStep.trace: shows the actions of a pipeline's schedule, and the model has none. Give it to "
            "jaxpar.pp.pipeline(model, mesh['pp'], ...) first; for one program there is jax.profiler.trace(folder)."
        )

    def _arguments(self, batch: PyTree) -> tuple[Any, ...]:
        return (*self._model.values(), *self._optimizer.values(), self._states, self._global_batch(batch))

    def _global_batch(self, batch: PyTree) -> PyTree:
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch)):
            sharding = NamedSharding(self._mesh, PartitionSpec(self._batch_axes))
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)
        return global_batch(batch, self._mesh, self._batch_axes)

    def _agree(self, what: str, program: jax.stages.Wrapped, arguments: tuple[Any, ...]) -> None:
        """Before the first run of several processes: do all mean the same program, and are all there?"""
        if len({device.process_index for device in self._mesh.devices.flat}) == 1:
            return
        shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", arguments[-1])
        text = program.lower(*arguments).as_text()
        facts = {
            "mesh": f"{dict(self._mesh.shape)} over devices {[d.id for d in self._mesh.devices.flat]}",
            "batch": str(shapes),
            "options": self._options,
            "program": hashlib.sha256(text.encode()).hexdigest(),
        }
        assert_same_everywhere(what, facts)
        warm_up(self._mesh)

    def _wait_for_old_steps(self, loss: jax.Array) -> None:
        if self._mesh.devices.flat[0].platform == "cpu":
            self._in_flight.append(loss)
            if len(self._in_flight) > MAX_STEPS_IN_FLIGHT_ON_CPU:
                jax.block_until_ready(self._in_flight.popleft())

    def _init_hook_states(self) -> tuple[PyTree, ...]:
        """The hook's state for each parameter and rank: f32[ranks@batch_axes, ...]; nothing for a stateless hook."""
        local = [
            jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype) for x in self._model.values()[0]
        ]
        states = self._local.sums.reduction.init_states(local)
        if not jax.tree.leaves(states):
            return states
        by_rank = NamedSharding(self._mesh, PartitionSpec(self._local.axes or None))

        def stack(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x, (self._local.num_ranks, *x.shape))

        return jax.jit(lambda: jax.tree.map(stack, states), out_shardings=by_rank)()

    def _build(self, parts: Parts, *, donate: bool) -> jax.stages.Wrapped:
        params, rest = ([x.sharding for x in leaves] for leaves in self._model.values())
        specs, rest_specs = [live_spec(x) for x in params], [live_spec(x) for x in rest]
        cut = [live_spec(c.sharding) if c else spec for c, spec in zip(self._cuts, specs, strict=True)]
        by_rank = PartitionSpec(self._local.axes or None)
        replicas = parts.replicas
        local = jax.shard_map(
            self._local if replicas is None else replicas.local(self._local),
            mesh=self._mesh,
            in_specs=(specs, rest_specs, by_rank, PartitionSpec(self._local.positions.rows or None)),
            out_specs=(cut, rest_specs, by_rank, PartitionSpec()),
        )

        one = cut if replicas is None else replicas.of_one(cut)
        update = Update(
            model=self._model,
            optimizer=self._optimizer,
            cuts=tuple(cut and cut.sharding for cut in self._cuts),
            clip=None if parts.clip is None else clipping(*parts.clip, self._mesh, one),
            gather=jax.shard_map(
                self._local.sums.gathered, mesh=self._mesh, in_specs=(cut, specs), out_specs=specs
            ),
        )
        updated_all = update if replicas is None else replicas.update(update)

        def train_step(params: Any, rest: Any, chosen: Any, other: Any, states: Any, batch: PyTree) -> Any:
            num_parts = math.prod(self._mesh.shape[axis] for axis in self._batch_axes)
            check_rows(batch, num_parts, self._accumulate, self._batch_axes)
            # What lies in host memory is copied to the device here, and back by the shardings of the results.
            params, rest, chosen, other = jax.tree.map(on_device, (params, rest, chosen, other))
            grads, rest, states, metrics = local(params, rest, states, batch)
            updated, norms = updated_all(grads, params, rest, chosen, other, metrics["loss"])
            return (*updated, states, metrics | norms)

        arguments = (*self._model.values(), *self._optimizer.values(), self._states)
        kept = jax.tree.map(lambda x: x.sharding, arguments)
        replicated = NamedSharding(self._mesh, PartitionSpec())
        return jax.jit(
            train_step,
            out_shardings=(*kept, replicated),
            donate_argnums=(0, 1, 2, 3, 4) if donate else (),
            compiler_options=_compat.compiler_options(self._mesh.devices.flat[0].platform),
        )

    def _evaluation(self, model: Variables) -> jax.stages.Wrapped:
        local = dataclasses.replace(self._local, merge=model.merge, split=model.rest_of)
        specs, rest_specs = ([live_spec(x.sharding) for x in leaves] for leaves in model.values())
        rows = PartitionSpec(local.positions.rows or None)
        mapped = jax.shard_map(
            local.evaluated, mesh=self._mesh, in_specs=(specs, rest_specs, rows), out_specs=PartitionSpec()
        )

        def evaluate(params: Any, rest: Any, batch: PyTree) -> dict[str, PyTree]:
            num_parts = math.prod(self._mesh.shape[axis] for axis in self._batch_axes)
            check_rows(batch, num_parts, self._accumulate, self._batch_axes)
            params, rest = jax.tree.map(on_device, (params, rest))
            return mapped(params, rest, batch)

        platform = self._mesh.devices.flat[0].platform
        return jax.jit(evaluate, compiler_options=_compat.compiler_options(platform))
