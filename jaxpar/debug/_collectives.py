"""The collectives of a compiled program: which, over which mesh axis, how often, how many bytes.

    kind                operand (what a device puts in)   result            ring: bytes a device sends
    all_reduce          N                                 N                 2 (n-1)/n N
    all_gather          N / n                             N                 (n-1)/n N
    reduce_scatter      N                                 N / n             (n-1)/n N
    all_to_all          N                                 N                 (n-1)/n N
    collective_permute  N                                 N                 N
    broadcast           N                                 N                 N

N = `Collective.bytes`, the full buffer of one execution on one device; n = number of devices in a group. XLA's
combined collectives have several operands and count as one. A collective in a loop counts once per iteration, an
asynchronous start/done pair once, one over groups of a single device not at all. Branches of a conditional are
all counted and marked. XLA:CPU widens bfloat16 to float32 before it communicates: there, bytes are doubled.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxpar.debug._groups import axes_of_groups, axes_of_pairs, replica_groups, source_target_pairs
from jaxpar.debug._hlo import Computation, Instruction, Module
from jaxpar.debug._loops import trip_count
from jaxpar.debug._program import Program, read_program
from jaxpar.debug._table import Collective, CollectiveTable
from jaxpar.mesh import MeshLike

_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "broadcast",
}


def collectives(program: Program, *args: Any, mesh: MeshLike | None = None, **kwargs: Any) -> CollectiveTable:
    """List the collectives of the compiled program of `program(*args, **kwargs)`, without running it.

    PyTorch: `CommDebugMode` (row G1). There, collectives are counted while the program runs; here they are read
    from the optimized HLO, so what XLA merged, split or removed is counted as it will run.

    Args:
        program: A function, something with `.lower(*args)` (a jitted function, a `TrainStep`), a
            `jax.stages.Lowered` or `Compiled`, or the text of an HLO module.
        *args: Arguments to lower with; arrays or `jax.ShapeDtypeStruct`s with shardings.
        mesh: Mesh that names the axes. Default: the mesh in the shardings of the program's inputs.
        **kwargs: Keyword arguments to lower with.

    Returns:
        One row for each collective instruction, in program order.

    Raises:
        MeshError: `mesh` has another number of devices than the program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> mesh = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
        >>> f = jax.shard_map(lambda x: jax.lax.psum(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> print(collectives(f, jnp.ones((8, 16))))
        kind        axis  count  bytes  dtype    operands   sent  where
        ----------  ----  -----  -----  -------  --------  -----  -----
        all_reduce  dp        1  256 B  float32         1  256 B  entry
    """
    read = read_program(program, *args, mesh=mesh, **kwargs)
    rows = _walk(read.module, read.module.entry, read.axis_sizes, _Place())
    return CollectiveTable(tuple(rows), tuple(read.axis_sizes.items()))


@dataclass(frozen=True)
class _Place:
    """Where the walk stands: how often this code runs, and inside what."""

    count: int = 1
    is_known: bool = True
    where: str = "entry"
    is_conditional: bool = False

    def in_loop(self, trips: int | None) -> "_Place":
        count, known = (self.count, False) if trips is None else (self.count * trips, self.is_known)
        return dataclasses.replace(self, count=count, is_known=known, where="loop")

    def in_branch(self) -> "_Place":
        return dataclasses.replace(self, is_conditional=True)


def base_opcode(instruction: Instruction) -> str:
    """The opcode without `-start`, which XLA:GPU and XLA:TPU append to what they run asynchronously."""
    return instruction.opcode.removesuffix("-start")


def collective_kind(instruction: Instruction) -> str | None:
    """jaxpar's name of the collective that the instruction (or the start of it) is; None for all others."""
    return _KINDS.get(base_opcode(instruction))


def describe(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    axis_sizes: dict[str, int],
    place: "_Place | None" = None,
) -> Collective | None:
    """The row for one collective instruction; None when every group has a single device."""
    kind = collective_kind(instruction)
    assert kind is not None, instruction
    place = _Place() if place is None else place
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


def _walk(module: Module, name: str, axis_sizes: dict[str, int], place: _Place) -> Iterator[Collective]:
    computation = module.computations[name]
    for instruction in computation.instructions:
        if collective_kind(instruction):
            row = describe(module, computation, instruction, axis_sizes, place)
            if row is not None:
                yield row
            continue
        inner = place
        if instruction.opcode == "while":
            inner = place.in_loop(trip_count(module, computation, instruction))
        elif instruction.opcode == "conditional":
            inner = place.in_branch()
        elif instruction.opcode.endswith(("-update", "-done")):
            continue  # the start of an asynchronous pair has been counted
        for called in instruction.called:
            if called in module.computations:
                yield from _walk(module, called, axis_sizes, inner)


def _result_bytes(kind: str, operand_bytes: int, group_size: int) -> int:
    if kind == "all_gather":
        return operand_bytes * group_size
    return operand_bytes // group_size if kind == "reduce_scatter" else operand_bytes


def _wire_bytes(kind: str, operand_bytes: int, n: int) -> int:
    """Bytes that each device sends in a ring (table in the module docstring)."""
    full = operand_bytes * n if kind == "all_gather" else operand_bytes
    if kind in ("collective_permute", "broadcast"):
        return full
    return full * (n - 1) * (2 if kind == "all_reduce" else 1) // n
