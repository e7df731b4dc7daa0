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

from collections.abc import Iterator
from typing import Any

from jaxpar.debug._describe import Place, collective_kind, describe
from jaxpar.debug._hlo import Module
from jaxpar.debug._program import Program, read_program
from jaxpar.debug._table import Collective, CollectiveTable
from jaxpar.mesh import MeshLike


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
    rows = _walk(read.module, read.module.entry, read.axis_sizes, Place())
    return CollectiveTable(tuple(rows), tuple(read.axis_sizes.items()))


def _walk(module: Module, name: str, axis_sizes: dict[str, int], place: Place) -> Iterator[Collective]:
    computation = module.computations[name]
    for instruction in computation.instructions:
        if collective_kind(instruction):
            row = describe(module, computation, instruction, axis_sizes, place)
            if row is not None:
                yield row
            continue
        if instruction.opcode.endswith(("-update", "-done")):
            continue  # the start of an asynchronous pair has been counted
        inside = place.inside(module, computation, instruction)
        for called in instruction.called:
            if called in module.computations:
                yield from _walk(module, called, axis_sizes, inside)
