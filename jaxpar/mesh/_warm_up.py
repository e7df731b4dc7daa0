"""The first collective of every clique, run while all processes are known to be there.

    mesh (dp=2, tp=2), processes a b c d      1. all      a b c d
                                              2. dp       a c | b d
                                              3. tp       a b | c d

The first collective of a clique (an ordered list of devices) opens its connections, with a fixed limit of 30 s that
no option changes, and a failure is final. Processes that compile or load data for different times would meet it in
the first training step; so they meet here, behind a barrier with a deadline that names who is missing.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar._compat import needs_large_first_collective
from jaxpar.mesh._init_mesh import MeshLike, as_jax_mesh
from jaxpar.mesh._meeting import meet
from jaxpar.mesh._process_group import current_group

_LARGE_BYTES = 16 << 20


def warm_up(mesh: MeshLike, *, timeout_s: float | None = None) -> None:
    """Opens the connections of a mesh: one collective over all axes, then one over each axis.

    Every process with a device in the mesh calls it; the second call for a mesh does nothing, nor does a call in
    a program that is alone. `jaxpar.TrainStep` calls it before its first step.

    Args:
        mesh: The mesh, or a slice of it (the whole mesh is warmed).
        timeout_s: Deadline for the other processes to come; default the `timeout_s` of `init_process_group`.

    Raises:
        ProcessGroupError: Some ranks did not come in time.

    Example:
        >>> from jaxpar.mesh import init_device_mesh, warm_up
        >>> warm_up(init_device_mesh((2, 4), ("dp", "tp")))
    """
    _warm_up_once(as_jax_mesh(mesh), timeout_s)


@functools.cache
def _warm_up_once(mesh: jax.sharding.Mesh, timeout_s: float | None) -> None:
    members = _processes_of(mesh)
    if len(members) == 1:
        return
    num_elements = _LARGE_BYTES // 4 if needs_large_first_collective() else 1
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    cliques = [tuple(axes), *((axis,) for axis in axes if len(axes) > 1)]
    programs = [_sum_over(mesh, clique, num_elements) for clique in cliques]
    name = f"warm_up of the mesh {dict(mesh.shape)} on processes {members}"
    run_together(programs, mesh, name, timeout_s=timeout_s)


def run_together(
    programs: Sequence["jax.stages.Compiled"], mesh: jax.sharding.Mesh, name: str, *, timeout_s: float | None
) -> None:
    """Runs programs without arguments once all processes of the mesh have come with theirs.

    They come compiled: compiling takes each process its own time, and the limit is 30 s.

    Raises:
        ProcessGroupError: some did not come to the meeting `name` in time.
    """
    members = _processes_of(mesh)
    meet(current_group(), name, True, judge=lambda _: True, members=members, timeout_s=timeout_s)
    for program in programs:
        jax.block_until_ready(program())


def _processes_of(mesh: jax.sharding.Mesh) -> list[int]:
    return sorted({device.process_index for device in mesh.devices.flat})


def _sum_over(mesh: jax.sharding.Mesh, axes: tuple[str, ...], num_elements: int) -> "jax.stages.Compiled":
    """A compiled program whose one collective sums `num_elements` floats over the axes."""

    def body() -> jax.Array:
        # The index makes the addends differ over the axes, so the sum is a real one.
        return jnp.max(jax.lax.psum(jnp.full(num_elements, jax.lax.axis_index(axes), jnp.float32), axes))

    program = jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P(), check_vma=True)
    return jax.jit(program).lower().compile()
