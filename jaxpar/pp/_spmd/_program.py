"""The tick loop: one program over the whole mesh that runs a schedule, the same on every rank.

    carry      registers, messages under way, sums, gradients, variables          updated in place
    tick       for each phase:   switch(this rank's program)  |  the phase before's messages travel beside it
                                 registers <- what arrived

All devices of a rank choose the same program, so collectives over the other axes are right inside it; over the pipeline's
axis there are the messages and nothing else.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpar import _compat
from jaxpar._module import vary
from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._spmd._lift import lowered
from jaxpar.pp._spmd._slots import Slots
from jaxpar.pp._spmd._tables import Message, Phase, Program, Tables, places
from jaxpar.pp._spmd._values import Pool, Values, typed
from jaxpar.pp._stage import Stage

AT_ONCE = 16  # collectives: more than a stage of four blocks has under way over fsdp and tp
Leaves = list[Any]
Registers = dict[Pool, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """What programs change.

    Args:
        registers: of each kind.
        sums: slots.
        grads: slots.
        changed: slots.
    """

    registers: Registers
    sums: Leaves
    grads: Leaves
    changed: Leaves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """What programs read only: slots, and the variables as they were before the step."""

    params: Leaves
    fixed: Leaves
    batch: Leaves
    before: Leaves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Row:
    """What one rank does in one tick, for each phase."""

    choice: Leaves
    microbatch: Leaves
    registers: Leaves
    arrivals: list[dict[int, Any]]


def rows(tables: Tables) -> Row:
    """All ticks of all ranks, i32[ranks, ticks, ...]."""
    phases = tables.phases
    return Row(
        [p.choice for p in phases],
        [p.microbatch for p in phases],
        [p.registers for p in phases],
        [p.arrivals for p in phases],
    )


@dataclass(frozen=True, eq=False)
class TickLoop:
    """Args:
    mesh: the whole mesh.
    axis: the pipeline's.
    stages: of the trace over the whole mesh, where everything varies over the pipeline's axis.
    counts: for each stage which of its changed variables every microbatch starts anew with.
    slots: of each role.
    fixed: for each stage, its fixed variables as they are outside of slots.
    values: what actions read and make.
    tables: what runs when.
    """

    mesh: Mesh
    axis: str
    stages: tuple[Stage, ...]
    counts: tuple[frozenset[int], ...]
    slots: dict[str, Slots]
    fixed: tuple[tuple[Any, ...], ...]
    values: Values
    tables: Tables

    def compiled(self) -> Any:
        """`(rows, params, fixed, batch, sums, grads, changed) -> (sums, grads, changed)`, slots; the last three donated."""
        roles = ("params", "fixed", "batch", "sums", "grads", "changed")
        specs = tuple(self.slots[role].specs for role in roles)
        by_rank = jax.tree.map(lambda _: PartitionSpec(self.axis), rows(self.tables))
        mapped = jax.shard_map(self._run, mesh=self.mesh, in_specs=(by_rank, *specs), out_specs=specs[3:])
        # XLA counts what a stage may have under way, and ends a message before a stage begins that leaves no room for it.
        platform = self.mesh.devices.flat[0].platform
        options = _compat.compiler_options(platform, num_at_once=AT_ONCE)
        return jax.jit(mapped, donate_argnums=(4, 5, 6), compiler_options=options)

    def _run(
        self,
        table: Row,
        params: Leaves,
        fixed: Leaves,
        batch: Leaves,
        sums: Leaves,
        grads: Leaves,
        changed: Leaves,
    ) -> tuple[Leaves, Leaves, Leaves]:
        inputs = Inputs(params, fixed, batch, changed)
        registers = {pool: pool[1].zeros(count) for pool, count in self.tables.num_registers.items()}
        state = State(registers, sums, grads, changed)
        messages = [{o: _empty(m) for o, m in p.messages.items()} for p in self.tables.phases]
        table = jax.tree.map(lambda x: x[0], table)  # this rank's
        (state, _), _ = lax.scan(functools.partial(self._tick, inputs), (state, messages), table)
        return state.sums, state.grads, state.changed

    def _tick(self, inputs: Inputs, carry: Any, row: Row) -> tuple[Any, None]:
        state, messages = carry
        messages = list(messages)
        for i, phase in enumerate(self.tables.phases):
            before = (i - 1) % len(self.tables.phases)
            late = {}
            if self.tables.phases[before].is_late:
                late = self._travel(self.tables.phases[before], messages[before])
            state, messages[i] = self._phase(i, phase, inputs, row, state, messages[i])
            registers = self._landed(self.tables.phases[before], state.registers, late, row.arrivals[before])
            if not phase.is_late:
                registers = self._landed(phase, registers, self._travel(phase, messages[i]), row.arrivals[i])
            state = State(registers, state.sums, state.grads, state.changed)
        return (state, messages), None

    def _phase(
        self, i: int, phase: Phase, inputs: Inputs, row: Row, state: State, messages: dict[int, Leaves]
    ) -> tuple[State, dict[int, Leaves]]:
        for group, programs in enumerate(phase.programs):
            do = functools.partial(self._do, phase, inputs, row.microbatch[i], row.registers[i])
            state, messages = self._group(programs, do, row.choice[i][group], state, messages)
        return state, messages

    def _group(
        self,
        programs: tuple[Program, ...],
        do: Callable[..., Any],
        chosen: Any,
        state: State,
        messages: dict[int, Leaves],
    ) -> tuple[State, dict[int, Leaves]]:
        """One choice. Only what some of its programs change goes through it; what they read stays outside."""
        written, is_forward = self._written(programs), programs[0][0] == Op.F

        def changing(full: State) -> State:
            pools = {pool: full.registers[pool] for pool in written}
            return (
                State(pools, full.sums, [], full.changed) if is_forward else State(pools, [], full.grads, [])
            )

        def whole(part: State) -> State:
            forward, backward = (part, state) if is_forward else (state, part)
            return State(state.registers | part.registers, forward.sums, backward.grads, forward.changed)

        def branch(program: Program) -> Callable[..., Any]:
            def run(part: State, some: dict[int, Leaves]) -> Any:
                new, sent = do(program, whole(part), some)
                return changing(new), sent

            return run

        branches = [lambda part, some: (part, some), *map(branch, programs)]
        sent = {
            offset: messages[offset]
            for offset in sorted({self.offsets[p] for p in programs if p in self.offsets})
        }
        part, sent = lax.switch(chosen, branches, changing(state), sent)
        return whole(part), messages | sent

    def _written(self, programs: tuple[Program, ...]) -> list[Pool]:
        """The pools that some of these programs write."""
        found: set[Pool] = set()
        for op, stage in programs:
            action = Action(stage, op, 0)
            stays = [] if (op, stage) in self.offsets else self.values.handed_on(action)
            found |= set(map(self.values.pool_of, self.values.kept(action) + stays))
        return sorted(found)

    # Messages

    def _travel(self, phase: Phase, messages: dict[int, Leaves]) -> dict[int, Leaves]:
        return {
            offset: _permuted(messages[offset], message, self.axis)
            for offset, message in phase.messages.items()
        }

    def _landed(
        self, phase: Phase, registers: Registers, came: dict[int, Leaves], arrivals: dict[int, Any]
    ) -> Registers:
        registers = dict(registers)
        for offset, values in came.items():
            for i, (place, pool) in enumerate(phase.messages[offset].landings):
                registers[pool] = _written(registers[pool], values[place], arrivals[offset][i])
        return registers

    # The programs of a stage

    def _do(
        self,
        phase: Phase,
        inputs: Inputs,
        microbatch: Any,
        registers: Any,
        program: Program,
        state: State,
        messages: dict[int, Leaves],
    ) -> tuple[State, dict[int, Leaves]]:
        op, s = program
        action = Action(s, op, 0)
        reads = self.values.read(action)
        values = [
            typed(_read(state.registers[self.values.pool_of(v)], registers[i]), self.values.type_of(v))
            for i, v in enumerate(reads)
        ]
        run = {Op.F: self._forward, Op.B: self._backward, Op.I: self._inputs, Op.W: self._weights}[op]
        kept, handed_on, state = run(s, values, inputs, microbatch, state)
        return self._stored(phase, action, registers[len(reads) :], kept, handed_on, state, messages)

    def _stored(
        self,
        phase: Phase,
        action: Action,
        homes: Any,
        kept: Leaves,
        handed_on: Leaves,
        state: State,
        messages: dict[int, Leaves],
    ) -> tuple[State, dict[int, Leaves]]:
        """What a program made, in registers and messages."""
        offset = self.offsets.get((action.op, action.stage))
        to_keep = [*zip(self.values.kept(action), kept, strict=True)]
        to_hand_on = [*zip(self.values.handed_on(action), handed_on, strict=True)]
        registers, messages = dict(state.registers), dict(messages)
        for i, (value, x) in enumerate(to_keep + (to_hand_on if offset is None else [])):
            pool = self.values.pool_of(value)
            registers[pool] = _written(registers[pool], pool[1].value(x), homes[i])
        if offset is not None:
            message = list(messages[offset])
            kinds = [self.values.kind_of(value) for value, _ in to_hand_on]
            for place, kind, (_, x) in zip(
                places(phase.messages[offset], kinds), kinds, to_hand_on, strict=True
            ):
                message[place] = kind.value(x)
            messages[offset] = message
        return State(registers, state.sums, state.grads, state.changed), messages

    @functools.cached_property
    def offsets(self) -> dict[Program, int]:
        """How many ranks on each program's message goes, if it sends one."""
        owner, num = self.slots["params"].rank_of_stage, self.mesh.shape[self.axis]
        found = {}
        for s, (here, there) in enumerate(zip(owner, owner[1:], strict=False)):
            if here != there:
                found[Op.F, s] = (there - here) % num
                found |= {(op, s + 1): (here - there) % num for op in (Op.B, Op.I)}
        return found

    def _taken(self, role: str, s: int, slots: Leaves) -> Leaves:
        return [slots[i] for i in self.slots[role].places[s]]

    def _given(self, role: str, s: int, slots: Leaves, values: Leaves) -> Leaves:
        slots = list(slots)
        for i, x in zip(self.slots[role].places[s], values, strict=True):
            slots[i] = x
        return slots

    def _forward(
        self, s: int, received: Leaves, inputs: Inputs, number: Any, state: State
    ) -> tuple[Leaves, Leaves, State]:
        stage = self.stages[s]
        fixed = [
            lowered(x, y) for x, y in zip(self._taken("fixed", s, inputs.fixed), self.fixed[s], strict=True)
        ]
        now, before = (self._taken("changed", s, slots) for slots in (state.changed, inputs.before))
        changed = [b if i in self.counts[s] else x for i, (x, b) in enumerate(zip(now, before, strict=True))]
        sent, kept, changed, sums = stage.run_forward(
            self._taken("params", s, inputs.params),
            fixed,
            [x[0] for x in changed],
            self._taken("batch", s, inputs.batch),
            number,
            received,
            [x[0] for x in self._taken("sums", s, state.sums)],
        )
        changed = [vary(x[None], _axes(old)) for x, old in zip(changed, now, strict=True)]
        olds = self._taken("sums", s, state.sums)
        sums = [vary(x[None], _axes(old)) for x, old in zip(sums, olds, strict=True)]
        state = State(
            state.registers,
            self._given("sums", s, state.sums, sums),
            state.grads,
            self._given("changed", s, state.changed, changed),
        )
        return kept, sent, state

    def _backward(
        self, s: int, given: Leaves, inputs: Inputs, number: Any, state: State
    ) -> tuple[Leaves, Leaves, State]:
        outputs = self.stages[s].code.backward(*self._params(s, inputs), *given)
        num = len(self.stages[s].code.params)
        return [], outputs[num:], self._added(s, outputs[:num], state)

    def _inputs(
        self, s: int, given: Leaves, inputs: Inputs, number: Any, state: State
    ) -> tuple[Leaves, Leaves, State]:
        halves = self.stages[s].code.halves
        outputs = halves.first(*self._params(s, inputs), *given)
        return outputs[halves.num_first :], outputs[: halves.num_first], state

    def _weights(
        self, s: int, given: Leaves, inputs: Inputs, number: Any, state: State
    ) -> tuple[Leaves, Leaves, State]:
        halves, params = self.stages[s].code.halves, self._params(s, inputs)
        of_params = [params[i] for i in halves.second_uses if i < len(params)]
        return [], [], self._added(s, halves.second(*of_params, *given), state)

    def _params(self, s: int, inputs: Inputs) -> Leaves:
        return self.stages[s].marked(self._taken("params", s, inputs.params))

    def _added(self, s: int, new: Leaves, state: State) -> State:
        olds = self._taken("grads", s, state.grads)
        sums = [old + vary(x.astype(old.dtype)[None], _axes(old)) for old, x in zip(olds, new, strict=True)]
        return State(state.registers, state.sums, self._given("grads", s, state.grads, sums), state.changed)


def _axes(x: jax.Array) -> tuple[str, ...]:
    return tuple(_compat.varying_axes(jax.typeof(x)))


def _read(registers: jax.Array, i: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(registers, i, keepdims=False)


def _written(registers: jax.Array, x: jax.Array, i: Any) -> jax.Array:
    return lax.dynamic_update_index_in_dim(registers, x, i, 0)


def _empty(message: Message) -> Leaves:
    return [kind.zeros() for kind in message.kinds]


def _permuted(values: Leaves, message: Message, axis: str) -> Leaves:
    """A message on its way: what has the same dtype and axes goes in one piece."""
    arrived: Leaves = [None] * len(values)
    for dtype, axes in dict.fromkeys((kind.dtype, kind.axes) for kind in message.kinds):
        mine = [i for i, kind in enumerate(message.kinds) if (kind.dtype, kind.axes) == (dtype, axes)]
        flat = jnp.concatenate([values[i].ravel() for i in mine]) if len(mine) > 1 else values[mine[0]]
        came = lax.ppermute(flat, axis, message.pairs)
        sizes = [int(np.prod(message.kinds[i].shape)) for i in mine]
        pieces = jnp.split(came, np.cumsum(sizes)[:-1]) if len(mine) > 1 else [came]
        for i, piece in zip(mine, pieces, strict=True):
            arrived[i] = piece.reshape(message.kinds[i].shape)
    return arrived
