"""How much of a program's communication has matrix work to hide behind, read from the compiled schedule.

    all-gather-start  %a          issued
    fusion (dot)                  <- between start and done: the wire and the tensor cores work together
    all-gather-done   %a          awaited

A scheduled module prints instructions in order of issue, so this fraction is a fact of the program, the same on
every machine: bytes of collectives with a matmul between start and done, over bytes of all collectives, loops
multiplied out. Whether the matmul is long enough to hide the transfer depends on the hardware and is not modelled.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxpar._errors import CommunicationCheckError
from jaxpar.debug._describe import Place, collective_kind, describe
from jaxpar.debug._flops import matmul_flops
from jaxpar.debug._hlo import Computation, Instruction, Module
from jaxpar.debug._program import Program, read_program
from jaxpar.debug._table import AxisQuery, Collective, CollectiveTable
from jaxpar.debug._text import format_bytes, format_table
from jaxpar.mesh import MeshLike

_HEADER = ("kind", "axis", "count", "bytes", "issue", "matmul FLOPs inside")


@dataclass(frozen=True)
class ScheduledCollective:
    """A collective and what the schedule runs beside it.

    Attributes:
        collective: What it is.
        is_async: Started and awaited by different instructions.
        matmul_flops: Matrix-multiplication FLOPs issued between start and done, per execution.
    """

    collective: Collective
    is_async: bool
    matmul_flops: int

    @property
    def is_overlapped(self) -> bool:
        """Whether any matmul runs between start and done."""
        return self.matmul_flops > 0

    @property
    def total_bytes(self) -> int:
        """Bytes per device and run: `Collective.bytes` times `count`."""
        return self.collective.bytes * self.collective.count


@dataclass(frozen=True, repr=False)
class OverlapReport:
    """The collectives of a scheduled program, and the shares of their bytes that can hide.

    Attributes:
        rows: One for each collective instruction.
        axis_sizes: (name, size) of each axis of the program's mesh; empty when no mesh is known.
    """

    rows: tuple[ScheduledCollective, ...]
    axis_sizes: tuple[tuple[str, int], ...] = ()

    def select(self, kind: str | None = None, axis: AxisQuery | None = None) -> "OverlapReport":
        """The report of one kind and over exactly these axes only.

        Raises:
            CollectiveError: The kind is unknown.
            MeshError: The axis is not in the program's mesh, or no mesh is known.
        """
        table = CollectiveTable(tuple(row.collective for row in self.rows), self.axis_sizes)
        kept = {id(row) for row in table.select(kind, axis)}
        return OverlapReport(tuple(row for row in self.rows if id(row.collective) in kept), self.axis_sizes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all collectives per device and run."""
        return sum(row.total_bytes for row in self.rows)

    @property
    def async_fraction(self) -> float:
        """Share of the bytes that are started and awaited apart; nan if nothing is communicated."""
        return self._share(row.total_bytes for row in self.rows if row.is_async)

    @property
    def overlapped_fraction(self) -> float:
        """Share of the bytes with a matmul between start and done; nan if nothing is communicated."""
        return self._share(row.total_bytes for row in self.rows if row.is_overlapped)

    def __str__(self) -> str:
        table = format_table(_HEADER, [_cells(row) for row in self.rows], right=(2, 3, 5))
        return (
            f"{table}\n{format_bytes(self.total_bytes)} per device and run: {self.async_fraction:.0%} asynchronous, "
            f"{self.overlapped_fraction:.0%} with a matmul between start and done"
        )

    __repr__ = __str__

    def _share(self, part: Iterator[int]) -> float:
        return sum(part) / self.total_bytes if self.total_bytes else math.nan


def overlap(program: Program, *args: Any, mesh: MeshLike | None = None, **kwargs: Any) -> OverlapReport:
    """Read from a compiled program's schedule which collectives have matrix work between start and done.

    XLA:CPU never overlaps; compile for the accelerator instead, ahead of time if it is not here
    (`jaxpar.debug.topology`).

    Args:
        program: As for `collectives`.
        *args: Arguments to lower with.
        mesh: As for `collectives`.
        **kwargs: Keyword arguments to lower with.

    Returns:
        One row for each collective, and the fractions.

    Raises:
        CommunicationCheckError: The module is not scheduled, so its text has no order of issue.
    """
    read = read_program(program, *args, mesh=mesh, **kwargs)
    if not read.module.is_scheduled:
        raise CommunicationCheckError(
            "overlap() needs a scheduled module, and this one has no is_scheduled=true in its header: its text is "
            "not in order of issue. Pass a compiled program, jitted.lower(*args).compile()."
        )
    rows = _walk(read.module, read.module.entry, read.axis_sizes, Place())
    return OverlapReport(tuple(rows), tuple(read.axis_sizes.items()))


@dataclass
class _InFlight:
    """A collective that has started; FLOPs are added until it is done."""

    collective: Collective
    is_async: bool
    flops: int = 0


def _walk(
    module: Module, name: str, axis_sizes: dict[str, int], place: Place
) -> Iterator[ScheduledCollective]:
    computation = module.computations[name]
    started: dict[str, _InFlight] = {}  # by the name that the next -update or -done takes as operand
    for instruction in computation.instructions:
        source = instruction.operands[0] if instruction.operands else ""
        if instruction.opcode.endswith("-done"):
            if source in started:
                yield _finished(started.pop(source))
        elif instruction.opcode.endswith("-update"):
            if source in started:
                started[instruction.name] = started.pop(source)
        elif found := _find_collective(module, computation, instruction):
            row = describe(module, *found, axis_sizes, place)
            if row is not None:
                started[instruction.name] = _InFlight(row, _is_async(instruction))
                if not instruction.opcode.endswith("-start"):
                    yield _finished(started.pop(instruction.name))
        else:
            inside = place.inside(module, computation, instruction)
            for called in instruction.called:
                if called in module.computations:
                    yield from _walk(module, called, axis_sizes, inside)
            flops = matmul_flops(module, computation, instruction) if started else 0
            for flight in started.values():
                flight.flops += flops


def _find_collective(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[Computation, Instruction] | None:
    """The instruction if it is a collective, else the collective inside an `async-start` that wraps one."""
    if collective_kind(instruction):
        return computation, instruction
    if instruction.opcode == "async-start":
        for name in instruction.called:
            wrapped = module.computations[name]
            for inner in wrapped.instructions:
                if collective_kind(inner):
                    return wrapped, inner
    return None


def _is_async(instruction: Instruction) -> bool:
    """XLA:GPU prints start/done also for what it decided to run in line, and marks it `is_sync`."""
    return instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes


def _finished(flight: _InFlight) -> ScheduledCollective:
    return ScheduledCollective(flight.collective, flight.is_async, flight.flops if flight.is_async else 0)


def _cells(row: ScheduledCollective) -> tuple[str, ...]:
    collective = row.collective
    return (
        collective.kind,
        ", ".join(collective.axes) or "?",
        f"{collective.count}" + ("" if collective.is_count_known else " x ?"),
        format_bytes(collective.bytes),
        "async" if row.is_async else "sync",
        f"{row.matmul_flops:.3g}",
    )
