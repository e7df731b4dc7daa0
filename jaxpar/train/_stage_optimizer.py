"""The optimizer of a pipelined model: each stage updates the parameters that it owns, with its own part of the state.

    gradients of all stages -> parts of the norm -> last stage: norm, factor -> every stage       two copies of one number
    stage s: its gradients, parameters, state, factor -> its parameters, state                    nothing moves between stages

Numbers that all stages need (a step count) are state of the first stage; the others update copies of their own.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.pp._place import Copies, restricted, spec_on_stage
from jaxpar.pp._ranks import Ranks, elsewhere, wanted
from jaxpar.train._clip import Norm
from jaxpar.train._stage_update import StageUpdate, cut_update, shape_of
from jaxpar.train._update import extra_arguments
from jaxpar.train._variables import Variables

Leaves = list[Any]
Types = list[jax.ShapeDtypeStruct]


class StageOptimizer:
    """The update of all stages; moves the optimizer's state when it is made.

    Args:
        model: the model's variables, on the devices of their stages.
        optimizer: the optimizer's variables.
        owners: for each parameter the stage that owns it.
        ranks: where stages lie.
        axis: the pipeline's axis.
        clip: largest norm to let through, and the norm; None: gradients are not clipped.
        borrowed: parameters that another rank than their owner's uses too.
        loss: shape and dtype of the step's.
        donate: whether the buffers of parameters and state are used again.

    Raises:
        ParallelizeError: one parameter's update depends on another stage's gradients.
    """

    def __init__(
        self,
        model: Variables,
        optimizer: Variables,
        owners: tuple[int, ...],
        ranks: Ranks,
        axis: str,
        *,
        clip: tuple[float, Norm] | None,
        borrowed: frozenset[int],
        loss: jax.ShapeDtypeStruct,
        donate: bool,
    ) -> None:
        self._model, self._optimizer, self._owners, self._ranks = model, optimizer, owners, ranks
        self._clip, self._borrowed, self._copies = clip, borrowed, Copies(ranks)
        (params, rest), (chosen, other) = model.values(), optimizer.values()
        arguments = [shape_of(x) for x in (*params, *params, *rest, *chosen, *other, loss)]
        owner = [*owners, *owners, *[None] * (len(rest) + len(chosen) + len(other) + 1)]
        state_names = [f"optimizer state {i}" for i in range(len(chosen) + len(other))]
        names = [*model.chosen_names, *state_names]
        update = functools.partial(_update, model, optimizer)
        cuts, found = cut_update(update, arguments, owner, names, len(ranks.of_stage))
        self._state_owners = found[len(params) :]
        self._first_state = 2 * len(params) + len(rest)
        self._loss_at = len(arguments) - 1
        state = self._placed([*chosen, *other], axis)
        self._assign_state(state)
        self._programs = [self._program(s, cut, [*params, *state], donate) for s, cut in enumerate(cuts)]

    @property
    def is_loss_wanted(self) -> bool:
        """Whether the update of some stage depends on the loss."""
        return any(self._loss_at in cut.inputs for cut, _ in self._programs)

    def __call__(self, grads: Leaves, losses: Mapping[int, jax.Array]) -> tuple[dict[str, jax.Array], Leaves]:
        """Updates parameters and state; returns the norm of the gradients, if they are clipped, and the parameters.

        Args:
            grads: of all parameters, on the stages that own them.
            losses: the step's loss by rank, if it is wanted.
        """
        metrics: dict[str, jax.Array] = {}
        factors: Mapping[int, Any] = {}
        if self._clip is not None:
            metrics["grad_norm"], factors = self._norm(grads)
        (params, rest), state = self._model.values(), [*sum(self._optimizer.values(), [])]
        inputs = [*grads, *params, *rest, *state]
        new_params, new_state = list(params), list(state)
        shared: dict[tuple[int, int], Any] = {}
        for s, (cut, program) in enumerate(self._programs):
            rank = self._ranks.of_stage[s]
            taken = {
                i: losses.get(rank) if i == self._loss_at else self._taken(rank, i, inputs)
                for i in cut.inputs
            }
            if rank not in self._ranks.here:
                for i in self._borrowed.intersection(
                    cut.outputs
                ):  # what others fetch is a new value here too
                    new_params[i] = elsewhere(params[i])
                continue
            first, last = len(grads), 2 * len(grads)
            donated = {i: x for i, x in taken.items() if first <= i < last or self._is_state_of(s, i)}
            outputs = program(
                donated, {i: x for i, x in taken.items() if i not in donated}, factors.get(rank)
            )
            for i, x in zip(cut.outputs, outputs, strict=True):
                if i < len(params):
                    new_params[i] = x
                elif self._state_owners[i - len(params)] is None:
                    shared[rank, i - len(params)] = x
                else:
                    new_state[i - len(params)] = x
        self._share(state, new_state, shared)
        self._model.assign(new_params, rest)
        self._assign_state(new_state)
        return metrics, new_params

    def _placed(self, state: Leaves, axis: str) -> Leaves:
        """State on the devices of the stages that own it; what all need on those of all."""
        ranks, placed = self._ranks, []
        for i, (x, owner) in enumerate(zip(state, self._state_owners, strict=True)):
            spec, home = spec_on_stage(x, axis, ranks.meshes), ranks.of_stage[owner or 0]
            placed.append(restricted(x, NamedSharding(ranks.meshes[home], spec)))
            for rank, mesh in enumerate(ranks.meshes) if owner is None else ():
                copy = placed[-1] if rank == home else restricted(x, NamedSharding(mesh, spec))
                self._copies.keep(rank, i, placed[-1], copy)
        return placed

    def _share(self, old: Leaves, new: Leaves, made: Mapping[tuple[int, int], Any]) -> None:
        """Every rank made state that all need for itself; it stands for what the first stage's rank has."""
        home = self._ranks.of_stage[0]
        for i, owner in enumerate(self._state_owners):
            if owner is None:
                new[i] = made[home, i] if (home, i) in made else elsewhere(old[i])
                for rank in range(len(self._ranks.meshes)):
                    self._copies.keep(rank, i, new[i], made.get((rank, i), new[i]))

    def _assign_state(self, state: Leaves) -> None:
        num_chosen = len(self._optimizer.chosen)
        self._optimizer.assign(state[:num_chosen], state[num_chosen:])

    def _is_state_of(self, stage: int, i: int) -> bool:
        """Whether an input is state that this stage alone has."""
        return self._first_state <= i < self._loss_at and self._state_owners[i - self._first_state] == stage

    def _taken(self, rank: int, i: int, inputs: Leaves) -> Any:
        state = i - self._first_state
        if state >= 0 and self._state_owners[state] is None:
            return self._copies.on(rank, state, inputs[i], PartitionSpec())
        return inputs[i]

    def _program(self, stage: int, cut: StageUpdate, kept: Leaves, donate: bool) -> tuple[StageUpdate, Any]:
        mesh = self._ranks.mesh_of(stage)
        shardings = [
            x.sharding if x.sharding.mesh == mesh else NamedSharding(mesh, PartitionSpec())
            for x in (kept[i] for i in cut.outputs)
        ]
        run = functools.partial(_apply, cut, len(self._owners))
        return cut, jax.jit(run, out_shardings=shardings, donate_argnums=(0,) if donate else ())

    def _norm(self, grads: Leaves) -> tuple[jax.Array, dict[int, jax.Array]]:
        """The norm over the gradients of all stages, each counted once, and by rank the factor, where that is here."""
        ranks, (part_programs, root, total_types) = self._ranks, self._norm_programs
        parts: Leaves = []
        for rank, (mine, part, types) in part_programs.items():
            values = [part([grads[i] for i in mine])] if rank in ranks.here else None
            arrival = ranks.move(values, rank, ranks.last, types, "a part of the norm of the gradients")
            parts += arrival() if arrival else []
        made = root(parts) if ranks.last in ranks.here else None
        found: dict[int, Leaves] = {}
        for rank, types in enumerate(total_types):
            arrival = ranks.move(made, ranks.last, rank, types, "the norm of the gradients")
            if arrival:
                found[rank] = arrival()
        total = found[ranks.last if ranks.last in found else min(found)][0]
        return total, {rank: factor for rank, (_, factor) in found.items()}

    @functools.cached_property
    def _norm_programs(self) -> tuple[dict[int, tuple[list[int], Any, Types]], Any, list[Types]]:
        """For each rank that owns parameters: which, its part of the norm, the type at the last rank. There: the norm and the
        factor. For each rank: their types."""
        assert self._clip is not None
        max_norm, norm = self._clip
        params, ranks = self._model.values()[0], self._ranks
        parts: dict[int, tuple[list[int], Any, Types]] = {}
        for rank in range(len(ranks.meshes)):
            mine = [i for i, owner in enumerate(self._owners) if ranks.of_stage[owner] == rank]
            if mine:
                part = jax.jit(functools.partial(_part_of, norm), out_shardings=self._replicated(rank))
                type_ = jax.eval_shape(part, [shape_of(params[i]) for i in mine])
                parts[rank] = mine, part, [wanted(type_, self._replicated(ranks.last))]
        root = jax.jit(
            functools.partial(_root_of, norm, max_norm), out_shardings=self._replicated(ranks.last)
        )
        totals = jax.eval_shape(root, [shape_of(type_) for *_, (type_,) in parts.values()])
        return (
            parts,
            root,
            [
                [wanted(type_, self._replicated(rank)) for type_ in totals]
                for rank in range(len(ranks.meshes))
            ],
        )

    def _replicated(self, rank: int) -> NamedSharding:
        return NamedSharding(self._ranks.meshes[rank], PartitionSpec())


def _update(model: Variables, optimizer: Variables, *flat: Any) -> Leaves:
    """The whole update: gradients, parameters, variables, state, loss -> parameters, state."""
    *rows, loss = flat
    left = iter(rows)
    grads, params, rest, chosen, other = (
        [next(left) for _ in xs]
        for xs in (model.chosen, model.chosen, model.rest, optimizer.chosen, optimizer.rest)
    )
    merged, updater = model.merge(params, rest), optimizer.merge(chosen, other)
    grads_of_all = jax.tree.unflatten(model.treedefs[0], grads)
    updater.update(merged, grads_of_all, **extra_arguments(updater, loss))
    return [*model.split(merged)[0], *sum(optimizer.split(updater), [])]


def _apply(
    cut: StageUpdate, num_params: int, donated: dict[int, Any], others: dict[int, Any], factor: Any
) -> Leaves:
    inputs = donated | others
    if factor is not None:
        inputs = {i: (x * factor).astype(x.dtype) if i < num_params else x for i, x in inputs.items()}
    return cut.program(*(inputs[i] for i in cut.inputs))


def _part_of(norm: Norm, grads: Leaves) -> jax.Array:
    return norm.join(map(norm.part, grads))


def _root_of(norm: Norm, max_norm: float, parts: Leaves) -> Leaves:
    total = norm.root(norm.join(parts))
    return [total, jnp.minimum(1.0, max_norm / (total + 1e-6))]
