"""One collective instruction of an HLO module as a row: its kind, mesh axes, bytes, and where it stands."""

import dataclasses
from dataclasses import dataclass

from jaxpar.debug._groups import axes_of_groups, axes_of_pairs, replica_groups, source_target_pairs
from jaxpar.debug._hlo import Computation, Instruction, Module
from jaxpar.debug._loops import trip_count
from jaxpar.debug._table import Collective

_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "broadcast",
}


@dataclass(frozen=True)
class Place:
    """Where the walk stands: how often this code runs, and inside what."""

    count: int = 1
    is_known: bool = True
    where: str = "entry"
    is_conditional: bool = False

    def inside(self, module: Module, computation: Computation, instruction: Instruction) -> "Place":
        """The place of the computations that an instruction calls."""
        if instruction.opcode == "while":
            return self._in_loop(trip_count(module, computation, instruction))
        if instruction.opcode == "conditional":
            return dataclasses.replace(self, is_conditional=True)
        return self

    def _in_loop(self, trips: int | None) -> "Place":
        count, known = (self.count, False) if trips is None else (self.count * trips, self.is_known)
        return dataclasses.replace(self, count=count, is_known=known, where="loop")


def collective_kind(instruction: Instruction) -> str | None:
    """jaxpar's name of the collective that the instruction (or the start of it) is; None for all others."""
    return _KINDS.get(instruction.opcode.removesuffix("-start"))


def describe(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    axis_sizes: dict[str, int],
    place: Place,
) -> Collective | None:
    """The row for one collective instruction; None when every group has a single device."""
    kind = collective_kind(instruction)
    assert kind is not None, instruction
    permutes = kind == "collective_permute"
    if permutes:
        groups = source_target_pairs(instruction.attributes)
    else:
        groups = replica_groups(instruction.attributes, module.num_devices)
    group_size = len(groups[0]) if groups else 1
    if group_size <= 1:
        return None
    axes = (axes_of_pairs if permutes else axes_of_groups)(groups, axis_sizes) if axis_sizes else None
    operands = computation.operand_types(instruction)
    size = sum(operand.num_bytes for operand in operands)
    return Collective(
        kind=kind,
        axis=axes[0] if axes and len(axes) == 1 else axes,
        groups=groups,
        count=place.count,
        is_count_known=place.is_known,
        operand_bytes=size,
        result_bytes=_result_bytes(kind, size, group_size),
        wire_bytes=_wire_bytes(kind, size, group_size),
        dtype="+".join(dict.fromkeys(operand.dtype for operand in operands)),
        num_operands=len(instruction.operands),
        where=place.where,
        is_conditional=place.is_conditional,
        op_name=instruction.op_name,
        instruction=instruction.name,
    )


def _result_bytes(kind: str, operand_bytes: int, group_size: int) -> int:
    if kind == "all_gather":
        return operand_bytes * group_size
    return operand_bytes // group_size if kind == "reduce_scatter" else operand_bytes


def _wire_bytes(kind: str, operand_bytes: int, n: int) -> int:
    """Bytes that each device sends in a ring (see the table in `_collectives.py`)."""
    full = operand_bytes * n if kind == "all_gather" else operand_bytes
    if kind in ("collective_permute", "broadcast"):
        return full
    return full * (n - 1) * (2 if kind == "all_reduce" else 1) // n
