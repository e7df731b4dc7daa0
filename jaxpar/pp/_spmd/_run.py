"""Run a schedule as one program: the arrays of all stages go into slots, through the tick loop, and back to their stages."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.pp._schedule._schedule import Schedule
from jaxpar.pp._spmd._alike import alike
from jaxpar.pp._spmd._lift import Lift, lifted_type
from jaxpar.pp._spmd._moments import moments
from jaxpar.pp._spmd._program import TickLoop, rows
from jaxpar.pp._spmd._slots import Assembly, Slots
from jaxpar.pp._spmd._tables import tables
from jaxpar.pp._spmd._values import Values
from jaxpar.pp._stage import Stage
from jaxpar.pp._walk import StageArrays

READ, DONATED = ("params", "fixed", "batch"), ("sums", "grads", "changed")
Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class OneProgram:
    """Runs schedules over the stages of one trace; each schedule is compiled when it first runs.

    Args:
        mesh: the whole mesh.
        axis: the pipeline's.
        stages: as traced over the whole mesh, where everything varies over `axis`.
        arrays: what each stage works on, without values, on its own devices.
    """

    mesh: Mesh
    axis: str
    stages: tuple[Stage, ...]
    arrays: tuple[StageArrays, ...]
    known: "dict[Schedule, _Compiled]" = field(default_factory=dict, init=False)

    def __call__(
        self,
        schedule: Schedule,
        arrays: Sequence[StageArrays | None],
        counts: Sequence[frozenset[int]],
    ) -> None:
        """Run one step; `arrays` end up with the sums, the gradients, and the changed variables.

        Args:
            schedule: of computations.
            arrays: for each stage that is here what it works on, on its own devices before and after; changed in place.
            counts: for each stage, which of its changed variables every microbatch starts anew with (by position).
        """
        if schedule not in self.known:
            self.known[schedule] = self._compiled(schedule, counts)
        self.known[schedule].run(arrays)

    def lower(self, schedule: Schedule, counts: Sequence[frozenset[int]]) -> jax.stages.Lowered:
        """The program of a schedule, for the devices of the mesh, which need not be here."""
        loop = self._loop(schedule, counts)
        table = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._by_rank), rows(loop.tables)
        )
        return loop.compiled().lower(table, *(loop.slots[role].abstract for role in READ + DONATED))

    @property
    def _by_rank(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(self.axis))

    def _loop(self, schedule: Schedule, counts: Sequence[frozenset[int]]) -> TickLoop:
        slots_of = functools.partial(Slots.of, self.mesh, self.axis, schedule.rank_of_stage)
        values = Values([stage.code for stage in self.stages], self.axis)
        slots = {
            role: slots_of([[*map(lifted_type, getattr(a, role))] for a in self.arrays])
            for role in READ + DONATED
        }

        def outside(s: int) -> Hashable:
            """What a stage's programs take from around them."""
            fixed = tuple((x.shape, x.dtype) for x in self.arrays[s].fixed)
            hops = tuple(
                (schedule.rank_of_stage[t] - schedule.rank_of_stage[s]) % schedule.n_ranks
                for t in (s - 1, s + 1)
                if 0 <= t < schedule.n_stages
            )
            return tuple(x.places[s] for x in slots.values()), fixed, counts[s], hops

        return TickLoop(
            mesh=self.mesh,
            axis=self.axis,
            stages=self.stages,
            counts=tuple(counts),
            slots=slots,
            fixed=tuple(tuple(a.fixed) for a in self.arrays),
            values=values,
            tables=tables(moments(schedule), values, alike(self.stages, outside)),
        )

    def _compiled(self, schedule: Schedule, counts: Sequence[frozenset[int]]) -> "_Compiled":
        loop = self._loop(schedule, counts)
        return _Compiled(
            program=loop.compiled(),
            table=jax.tree.map(self._everywhere, rows(loop.tables)),
            assemblies={role: Assembly(slots) for role, slots in loop.slots.items()},
            lifts={role: tuple(Lift() for _ in self.arrays) for role in READ},
        )

    def _everywhere(self, x: Any) -> jax.Array:
        return jax.make_array_from_callback(x.shape, self._by_rank, lambda index: x[index])


@dataclass(frozen=True, eq=False)
class _Compiled:
    program: Callable[..., Any]
    table: Any
    assemblies: dict[str, Assembly]
    lifts: dict[str, tuple[Lift, ...]]

    def run(self, arrays: Sequence[StageArrays | None]) -> None:
        slots = (self.assemblies[role].joined(self._given(role, arrays)) for role in READ + DONATED)
        outputs = self.program(self.table, *slots)
        for role, made in zip(DONATED, outputs, strict=True):
            parts = self.assemblies[role].parted(made, self._given(role, arrays))
            for a, mine in zip(arrays, parts, strict=True):
                if a is not None:
                    setattr(a, role, mine)

    def _given(self, role: str, arrays: Sequence[StageArrays | None]) -> list[Leaves]:
        """What each stage puts into the slots of a role; nothing if it is not here."""
        of_stages = [None if a is None else getattr(a, role) for a in arrays]
        if role in DONATED:
            return [[] if x is None else x for x in of_stages]
        lifts = self.lifts[role]
        return [[] if x is None else lift(x) for lift, x in zip(lifts, of_stages, strict=True)]
