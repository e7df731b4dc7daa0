"""Starting `jax.distributed` when nothing can go wrong any more.

    rank 0    port free? --> "starting" in the store --> jax.distributed.initialize   (returns when all are there)
    others    wait for that --> poll the port with a plain connect --> jax.distributed.initialize

With `run_recoverable` the launcher keeps the service, and all are others.

A port in use is a SIGSEGV in jax 0.10, and a client that knocks before rank 0 listens sleeps up to 1.2 s in gRPC.
"""

import math
import socket
import time

import jax

from jaxpar import _compat
from jaxpar._errors import ProcessGroupError
from jaxpar.mesh._address import (
    address_at,
    host_and_port,
    interface_of,
    is_free,
    is_loopback,
    left_s,
    port_in_use,
)
from jaxpar.mesh._group import Membership, Patience
from jaxpar_launch.store import StoreClient


def start_jax(
    member: Membership, patience: Patience, store: StoreClient, prefix: str, deadline: float
) -> None:
    """Starts `jax.distributed` on every rank, once rank 0 has seen that its port is free.

    Raises:
        ProcessGroupError: The port is in use or cannot be reached, or JAX refused.
    """
    if member.recoverable:
        _join_service(member, deadline)
        return
    host, port = host_and_port(member.coordinator_address)
    if member.rank == 0:
        problem = "" if is_free(host, port) else port_in_use(member.coordinator_address)
        store.set(f"{prefix}/coordinator", problem)
    if problem := store.get(f"{prefix}/coordinator", left_s(deadline)):
        raise ProcessGroupError(problem)
    if member.rank != 0:
        _await_listener(member, deadline)
    jax.config.update("jax_enable_preemption_service", member.preemption)
    try:
        jax.distributed.initialize(
            member.coordinator_address,
            num_processes=member.world_size,
            process_id=member.rank,
            local_device_ids=member.local_device_ids,
            cluster_detection_method="deactivate",
            # JAX aborts the process when this one passes. All are here, so seconds are enough; be generous.
            initialization_timeout=math.ceil(max(30.0, left_s(deadline))),
            heartbeat_timeout_seconds=math.ceil(patience.heartbeat_timeout_s),
            shutdown_timeout_seconds=math.ceil(patience.shutdown_timeout_s),
            coordinator_bind_address=address_at(interface_of(host), port) if is_loopback(host) else None,
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessGroupError(
            f"init_process_group: jax.distributed.initialize failed on rank {member.rank}: {error}"
        ) from error


def _join_service(member: Membership, deadline: float) -> None:
    """The same with a service that the launcher keeps."""
    _await_listener(member, deadline)
    jax.config.update("jax_enable_preemption_service", False)
    try:
        _compat.connect_to_service(
            str(member.coordinator_address),
            rank=member.rank,
            world_size=member.world_size,
            timeout_s=math.ceil(max(30.0, left_s(deadline))),
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessGroupError(
            f"run_recoverable: rank {member.rank} cannot join the coordination service at {member.coordinator_address}: {error}"
        ) from error


def _await_listener(member: Membership, deadline: float) -> None:
    """Returns when JAX's coordinator accepts connections."""
    host, port = host_and_port(member.coordinator_address)
    why = "no time was left"
    while left_s(deadline) > 0.01:
        try:
            with socket.create_connection((host, port), timeout=left_s(deadline)) as connection:
                if connection.getsockname() != connection.getpeername():  # Linux can connect one to itself
                    return
        except OSError as error:
            why = str(error)
        time.sleep(0.005)
    raise ProcessGroupError(
        f"init_process_group: rank {member.rank} cannot reach JAX's coordinator at {member.coordinator_address},"
        f" which {'the launcher' if member.recoverable else 'rank 0'} has started: {why}. Is the port open between the hosts?"
    )
