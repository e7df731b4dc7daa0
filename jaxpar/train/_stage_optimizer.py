"""The optimizer of a pipelined model: each stage updates the parameters that it owns, with its own part of the state.

    gradients of all stages -> parts of the norm -> last stage: norm, factor -> every stage       two copies of one number
    stage s: its gradients, parameters, state, factor -> its parameters, state                    nothing moves between stages

Numbers that all stages need (a step count) are state of the first stage; the others update copies of their own.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.pp._place import Copies, spec_on_stage
from jaxpar.train._clip import Norm
from jaxpar.train._stage_update import StageUpdate, cut_update, shape_of
from jaxpar.train._variables import Variables

Leaves = list[Any]


class StageOptimizer:
    """The update of all stages; moves the optimizer's state when it is made.

    Args:
        model: the model's variables, on the devices of their stages.
        optimizer: the optimizer's variables.
        owners: for each parameter the stage that owns it.
        meshes: of each stage.
        axis: the pipeline's axis.
        clip: largest norm to let through, and the norm; None: gradients are not clipped.
        donate: whether the buffers of parameters and state are used again.

    Raises:
        ParallelizeError: one parameter's update depends on another stage's gradients.
    """

    def __init__(
        self,
        model: Variables,
        optimizer: Variables,
        owners: tuple[int, ...],
        meshes: tuple[Mesh, ...],
        axis: str,
        *,
        clip: tuple[float, Norm] | None,
        donate: bool,
    ) -> None:
        self._model, self._optimizer, self._owners, self._meshes = model, optimizer, owners, meshes
        self._clip, self._copies = clip, Copies(meshes)
        (params, rest), (chosen, other) = model.values(), optimizer.values()
        arguments = [shape_of(x) for x in (*params, *params, *rest, *chosen, *other)]
        owner = [*owners, *owners, *[None] * (len(rest) + len(chosen) + len(other))]
        state_names = [f"optimizer state {i}" for i in range(len(chosen) + len(other))]
        names = [*model.chosen_names, *state_names]
        update = functools.partial(_update, model, optimizer)
        cuts, found = cut_update(update, arguments, owner, names, len(meshes))
        self._state_owners = found[len(params) :]
        state = [
            jax.device_put(x, NamedSharding(meshes[owner or 0], spec_on_stage(x, axis)))
            for x, owner in zip((*chosen, *other), self._state_owners, strict=True)
        ]
        self._assign_state(state)
        self._programs = [self._program(s, cut, [*params, *state], donate) for s, cut in enumerate(cuts)]

    def __call__(self, grads: Leaves) -> dict[str, jax.Array]:
        """Updates parameters and state; returns the norm of the gradients, if they are clipped."""
        metrics: dict[str, jax.Array] = {}
        factors: Sequence[Any] = [None] * len(self._meshes)
        if self._clip is not None:
            metrics["grad_norm"], factors = self._norm(grads)
        (params, rest), state = self._model.values(), [*sum(self._optimizer.values(), [])]
        inputs = [*grads, *params, *rest, *state]
        new_params, new_state = list(params), list(state)
        for s, (cut, program) in enumerate(self._programs):
            taken = {i: self._taken(s, i, inputs) for i in cut.inputs}
            first, last = len(grads), 2 * len(grads)
            donated = {i: x for i, x in taken.items() if first <= i < last or self._is_state_of(s, i, inputs)}
            outputs = program(donated, {i: x for i, x in taken.items() if i not in donated}, factors[s])
            for i, x in zip(cut.outputs, outputs, strict=True):
                if i < len(params):
                    new_params[i] = x
                elif s == (self._state_owners[i - len(params)] or 0):
                    new_state[i - len(params)] = x
        self._model.assign(new_params, rest)
        self._assign_state(new_state)
        return metrics

    def _assign_state(self, state: Leaves) -> None:
        num_chosen = len(self._optimizer.chosen)
        self._optimizer.assign(state[:num_chosen], state[num_chosen:])

    def _is_state_of(self, stage: int, i: int, inputs: Leaves) -> bool:
        """Whether an input is state that this stage alone has."""
        first_state = len(inputs) - len(self._state_owners)
        return i >= first_state and self._state_owners[i - first_state] == stage

    def _taken(self, stage: int, i: int, inputs: Leaves) -> Any:
        first_state = len(inputs) - len(self._state_owners)
        if i >= first_state and self._state_owners[i - first_state] is None:
            return self._copies.on(stage, ("state", i), inputs[i], PartitionSpec())
        return inputs[i]

    def _program(self, stage: int, cut: StageUpdate, kept: Leaves, donate: bool) -> tuple[StageUpdate, Any]:
        shardings = [
            x.sharding if x.sharding.mesh == self._meshes[stage] else NamedSharding(self._meshes[stage], PartitionSpec())
            for x in (kept[i] for i in cut.outputs)
        ]  # fmt: skip
        run = functools.partial(_apply, cut, len(self._owners))
        return cut, jax.jit(run, out_shardings=shardings, donate_argnums=(0,) if donate else ())

    def _norm(self, grads: Leaves) -> tuple[jax.Array, list[jax.Array]]:
        """The norm over the gradients of all stages, each counted once, and the factor on the devices of each stage."""
        assert self._clip is not None
        max_norm, norm = self._clip
        home = NamedSharding(self._meshes[-1], PartitionSpec())
        mine = [
            [g for g, owner in zip(grads, self._owners, strict=True) if owner == s]
            for s in range(len(self._meshes))
        ]
        parts = [jax.device_put(_part_of(norm, some), home) for some in mine if some]
        total, factor = _root_of(norm, max_norm, parts)
        return total, [jax.device_put(factor, NamedSharding(mesh, PartitionSpec())) for mesh in self._meshes]


def _update(model: Variables, optimizer: Variables, *flat: Any) -> Leaves:
    """The whole update: gradients, parameters, variables, state -> parameters, state."""
    left = iter(flat)
    grads, params, rest, chosen, other = (
        [next(left) for _ in xs]
        for xs in (model.chosen, model.chosen, model.rest, optimizer.chosen, optimizer.rest)
    )
    merged, updater = model.merge(params, rest), optimizer.merge(chosen, other)
    updater.update(merged, jax.tree.unflatten(model.treedefs[0], grads))
    return [*model.split(merged)[0], *sum(optimizer.split(updater), [])]


def _apply(
    cut: StageUpdate, num_params: int, donated: dict[int, Any], others: dict[int, Any], factor: Any
) -> Leaves:
    inputs = donated | others
    if factor is not None:
        inputs = {i: (x * factor).astype(x.dtype) if i < num_params else x for i, x in inputs.items()}
    return cut.program(*(inputs[i] for i in cut.inputs))


@functools.partial(jax.jit, static_argnums=0)
def _part_of(norm: Norm, grads: Leaves) -> jax.Array:
    return norm.join(map(norm.part, grads))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _root_of(norm: Norm, max_norm: float, parts: Leaves) -> tuple[jax.Array, jax.Array]:
    total = norm.root(norm.join(parts))
    return total, jnp.minimum(1.0, max_norm / (total + 1e-6))
