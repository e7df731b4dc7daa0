"""Questions to the process group (who am I, how many are we), and meeting in it (barrier).

    init_process_group() --> group_slot() <-- get_rank, get_world_size, barrier, ...
                                  ^
                     destroy_process_group()

A program that never called `init_process_group` is a world of one, unless a launcher started it as one of several:
then asking is an error, so that nobody trains N separate models in silence.
"""

import jax

from jaxpar._errors import ProcessGroupError
from jaxpar.mesh._group import Membership, ProcessGroup, group_slot
from jaxpar.mesh._launched import launched
from jaxpar.mesh._meeting import meet


def current_group() -> ProcessGroup:
    """The group of this process; a world of one if it is alone.

    Raises:
        ProcessGroupError: This process is one of several, but `init_process_group` was not called.
    """
    if (group := group_slot().group) is not None:
        return group
    environment = launched()
    if jax.distributed.is_initialized() or (environment is not None and environment.member.world_size > 1):
        raise ProcessGroupError(
            "this process is one of several, but has not joined them: call jaxpar.init_process_group() once, first"
            " thing in the script, before any JAX array is made (and not jax.distributed.initialize)."
        )
    return world_of_one()


def world_of_one(
    *, timeout_s: float = 300.0, shutdown_timeout_s: float = 300.0, member: Membership | None = None
) -> ProcessGroup:
    """The group of a process that is alone."""
    return ProcessGroup(
        member or Membership(0, 1), timeout_s=timeout_s, shutdown_timeout_s=shutdown_timeout_s
    )


def raise_if_worker_lost() -> None:
    """A safe point to leave a world that has lost a worker; cheap.

    Raises:
        WorkerLostError: This one has (`run_recoverable`).
    """
    if (group := group_slot().group) is not None:
        group.check()


def is_initialized() -> bool:
    """Whether `init_process_group` was called, and `destroy_process_group` not since (row C7).

    Example:
        >>> import jaxpar.mesh
        >>> jaxpar.mesh.is_initialized()
        False
    """
    return group_slot().group is not None


def get_rank() -> int:
    """Which process this is, 0 to `get_world_size() - 1` (row C7). 0 in a program that is alone.

    Raises:
        ProcessGroupError: One of several processes, but `init_process_group` was not called.

    Example:
        >>> import jaxpar.mesh
        >>> jaxpar.mesh.get_rank(), jaxpar.mesh.get_world_size()
        (0, 1)
    """
    return current_group().rank


def get_world_size() -> int:
    """How many processes the job has (row C7). 1 in a program that is alone.

    Raises:
        ProcessGroupError: One of several processes, but `init_process_group` was not called.

    Example:
        >>> import jaxpar.mesh
        >>> jaxpar.mesh.get_world_size()
        1
    """
    return current_group().world_size


def get_local_rank() -> int:
    """Which of the processes on this host this is (row C7). 0 in a program that is alone.

    Raises:
        ProcessGroupError: One of several processes, but `init_process_group` was not called.

    Example:
        >>> import jaxpar.mesh
        >>> jaxpar.mesh.get_local_rank()
        0
    """
    return current_group().membership.local_rank or 0


def barrier(name: str, *, timeout_s: float | None = None) -> None:
    """Waits until every process has come to the barrier of this name (row C26, `monitored_barrier`).

    No array moves and no collective runs: the processes meet in the job's store. Use the same name for the same
    place in the program; each use counts as a new barrier.

    Args:
        name: Names the place, for the error message and to tell barriers apart.
        timeout_s: Deadline from now; default the `timeout_s` of `init_process_group`.

    Raises:
        ProcessGroupError: Some ranks did not come in time. Every process gets it and its text names them; a process
            that comes after the others gave up gets it too.

    Example:
        >>> import jaxpar.mesh
        >>> jaxpar.mesh.barrier("data is on disk", timeout_s=60)
    """
    meet(current_group(), f"barrier {name!r}", True, judge=lambda _: True, timeout_s=timeout_s)
