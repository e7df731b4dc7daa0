"""`init_process_group`: which process is this, of how many, and where do they meet?

    1. the launcher's environment  (jaxpar_launch.env.WorkerEnv)
    2. explicit arguments
    3. Slurm, Open MPI, Kubernetes, TPU pods, as JAX detects them
    4. nothing: a world of one, no network, no `jax.distributed`

Arguments that contradict the launcher are an error. One process needs no arguments and no launcher, so the same
script runs alone and on a cluster.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from jaxpar._compat import backend_is_started, detect_cluster
from jaxpar._errors import ProcessGroupError
from jaxpar.mesh._address import host_and_port
from jaxpar.mesh._group import Membership, Patience, Venue, group_slot
from jaxpar.mesh._join import join
from jaxpar.mesh._keep import keep_compiled
from jaxpar.mesh._launched import launched
from jaxpar.mesh._leave import leave_properly
from jaxpar.mesh._process_group import world_of_one
from jaxpar_launch.env import program_cache


def init_process_group(
    *,
    coordinator_address: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    timeout_s: float = 300.0,
    heartbeat_timeout_s: float = 100.0,
    shutdown_timeout_s: float = 300.0,
    preemption: bool = False,
) -> None:
    """Joins this process to the others of its job; call it once, before the first use of JAX (row C1).

    Under `jaxpar-launch`, Slurm, Open MPI, Kubernetes or on a TPU pod it needs no arguments; a program that was
    started alone becomes a world of one. All processes call the roll first: who is missing, doubled, out of range or
    different (world size, JAX version) is named on every process within `timeout_s`. Afterwards `jax.devices()`
    lists the devices of all processes.

    From then on an exception that nobody catches ends the process at once (exit code 1), so that its peers do not
    hang, and at the end of the script the processes wait for each other, at most `shutdown_timeout_s`.

    With JAXPAR_COMPILATION_CACHE_DIR in the environment (`jaxpar-launch --compilation-cache-dir DIR` sets it), every
    process keeps its compiled programs in that folder and loads them next time: a restart compiles nothing. It takes
    at most JAXPAR_COMPILATION_CACHE_MAX_BYTES (10 GiB). Trust the folder like code: the files are machine code.

    Args:
        coordinator_address: "host:port" of rank 0, the same on all processes.
        world_size: Number of processes.
        rank: This process, 0 to `world_size - 1`.
        local_device_ids: Accelerators of this host that this process takes; default all, or what the launcher or
            Slurm gives it.
        timeout_s: Deadline of joining, and default deadline of `barrier` and the object collectives.
        heartbeat_timeout_s: After so long without a sign of life JAX declares a process dead.
        shutdown_timeout_s: How long a process that has reached the end of the script waits for the others before it
            exits with code 1 and names them.
        preemption: False: SIGTERM ends a process, as usual. True: JAX catches SIGTERM, and all processes agree on a
            step at which to save, by `jax.experimental.multihost_utils.reached_preemption_sync_point(step)`.

    Raises:
        ProcessGroupError: The processes cannot meet, JAX is already in use, the arguments contradict each other or
            the launcher, or the group exists with other arguments. The same call again does nothing.

    Example:
        >>> import jaxpar.mesh
        >>> jaxpar.mesh.init_process_group()
        >>> jaxpar.mesh.get_world_size()
        1
        >>> jaxpar.mesh.destroy_process_group()
    """
    arguments = {"coordinator_address": coordinator_address, "world_size": world_size, "rank": rank}
    given = {name: value for name, value in arguments.items() if value is not None}
    patience = Patience(timeout_s, heartbeat_timeout_s, shutdown_timeout_s)
    device_ids = None if local_device_ids is None else tuple(local_device_ids)
    member, venue = _resolve(given, device_ids, preemption, timeout_s)
    slot = group_slot()
    if slot.group is not None:
        if (
            slot.group.membership.recoverable
        ):  # inside run_recoverable, which has joined, by another coordinator
            return
        _check_same(slot.group.membership, member)
        return
    if member.world_size > 1:
        _check_unused(member)
    keep_programs_if_asked(member)
    if member.world_size == 1:
        slot.group = world_of_one(timeout_s=timeout_s, shutdown_timeout_s=shutdown_timeout_s, member=member)
        return
    slot.group = join(member, patience, venue=venue)
    leave_properly()


# Who am I? -----------------------------------------------------------------------------------------------------


def _resolve(
    given: Mapping[str, str | int], device_ids: tuple[int, ...] | None, preemption: bool, timeout_s: float
) -> tuple[Membership, Venue | None]:
    """This process's place in the job, from the first source of the list above that knows it."""
    if (environment := launched()) is not None:
        _check_agreement(given, environment.member)
        member, venue = environment.member, environment.venue
        device_ids = member.local_device_ids if device_ids is None else device_ids
    elif given:
        member, venue = _explicit(given), None
    elif (found := detect_cluster(timeout_s)) is not None:
        address, world_size, rank, found_ids = found
        device_ids = device_ids if world_size == 1 or device_ids is not None else found_ids
        member, venue = Membership(rank, world_size, coordinator_address=address), None
    else:
        member, venue = Membership(0, 1), None
    return dataclasses.replace(member, local_device_ids=device_ids, preemption=preemption), venue


def keep_programs_if_asked(member: Membership) -> None:
    """Keeps compiled programs where the environment says, if it does; before the first of them is compiled.

    Raises:
        ProcessGroupError: What it says makes no sense.
    """
    try:
        cache = program_cache()
    except ValueError as error:
        raise ProcessGroupError(f"init_process_group: {error}") from error
    if cache is not None:
        keep_compiled(cache, member)


def _explicit(given: Mapping[str, str | int]) -> Membership:
    needed = ("coordinator_address", "world_size", "rank")
    if given.get("world_size") == 1 and given.get("rank", 0) == 0:
        return Membership(0, 1)
    if missing := [name for name in needed if name not in given]:
        raise ProcessGroupError(
            f"init_process_group: {', '.join(given)} given, but not {', '.join(missing)}. Without a launcher all three"
            ' are needed: init_process_group(coordinator_address="10.0.0.1:29500", world_size=2, rank=0). Or leave'
            " all out and start the script with jaxpar-launch."
        )
    member = Membership(
        int(given["rank"]), int(given["world_size"]), coordinator_address=str(given["coordinator_address"])
    )
    if member.world_size < 1:
        raise ProcessGroupError(
            f"init_process_group: world_size={member.world_size}, but a job has at least one process."
        )
    host_and_port(member.coordinator_address)
    return member


def _check_agreement(given: Mapping[str, str | int], member: Membership) -> None:
    contradictions = [
        f"{name}={value!r} was passed, the launcher set {getattr(member, name)!r}"
        for name, value in given.items()
        if value != getattr(member, name)
    ]
    if contradictions:
        raise ProcessGroupError(
            f"init_process_group: the arguments contradict the launcher's environment: {'; '.join(contradictions)}."
            " Under a launcher leave them out: init_process_group()."
        )


# Is it too late? -----------------------------------------------------------------------------------------------


def _check_same(old: Membership, new: Membership) -> None:
    changes = [
        f"{field.name} was {getattr(old, field.name)!r}, is now {getattr(new, field.name)!r}"
        for field in dataclasses.fields(Membership)
        if field.name != "local_rank" and getattr(old, field.name) != getattr(new, field.name)
    ]
    if changes:
        raise ProcessGroupError(
            f"init_process_group: the process group exists already, with other arguments: {'; '.join(changes)}. A"
            " process joins one job; call init_process_group once, or again with the same arguments."
        )


def _check_unused(member: Membership) -> None:
    if jax.distributed.is_initialized():
        raise ProcessGroupError(
            "init_process_group: jax.distributed is initialized already, by other code in this process. Leave that"
            " to init_process_group: it checks what jax.distributed.initialize cannot."
        )
    if backend_is_started():
        raise ProcessGroupError(
            f"init_process_group: JAX is already in use in this process (rank {member.rank} of {member.world_size}),"
            " so it would never see the other processes' devices. Call jaxpar.init_process_group() first thing in the"
            " script, before any array is made and before jax.devices(). Importing jaxpar, jax or flax is fine."
        )
