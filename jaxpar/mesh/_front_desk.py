"""The front desk: where processes without a launcher meet, at the one address that all of them know.

    rank 0    listen at coordinator_address --> roll call --> hand out the store's address --> close
    others    knock until it opens          --> roll call --> store's address              --> leave

The group's own store is on a free port of rank 0. When all have left the desk, JAX's coordinator takes over its port.
"""

import contextlib
import errno
import secrets
import time

from jaxpar._errors import ProcessGroupError
from jaxpar.mesh._address import address_at, host_and_port, interface_of, left_s, loopback_of, port_in_use
from jaxpar.mesh._group import Membership, Venue
from jaxpar.mesh._roll_call import Entry, roll_call
from jaxpar_launch.store import StoreAuthenticationError, StoreClient, StoreError, StoreServer

_FRONT_DESK_TOKEN = "jaxpar"
"""Explicit ranks share no secret; this only keeps strangers' protocols apart. Under the launcher there is one."""
_LINGER_S = 5.0


def meet_at_front_desk(member: Membership, deadline: float) -> tuple[int, Venue, StoreServer | None]:
    """Calls the roll at the coordinator's port.

    Returns:
        The local rank, where the group's store is, and its server on rank 0, which hosts it.

    Raises:
        ProcessGroupError: Someone is missing, doubled or different, or the port cannot be used.
    """
    desk = _open_front_desk(member) if member.rank == 0 else None
    if desk is None:
        return *_visit_front_desk(member, deadline), None
    host, _ = host_and_port(member.coordinator_address)
    hosted = StoreServer(interface_of(host), token=(token := secrets.token_hex(16)))
    venue = Venue(address_at(host, hosted.port), token, "group")
    try:
        here = address_at(loopback_of(host), desk.port)
        with desk, StoreClient(here, token=_FRONT_DESK_TOKEN, timeout_s=left_s(deadline)) as store:
            store.set("venue", [venue.address, venue.token, venue.prefix])
            try:
                local_rank = roll_call(store, Entry.of(member), prefix="roll", timeout_s=left_s(deadline))
            finally:
                # Also when it failed: whoever is on the way shall hear why, not find a closed door.
                visitors = [f"gone/{number}" for number in range(1, member.world_size)]
                with contextlib.suppress(StoreError):
                    store.wait(visitors, min(_LINGER_S, left_s(deadline) + 1.0))
    except BaseException:
        hosted.close()
        raise
    return local_rank, venue, hosted


def _open_front_desk(member: Membership) -> StoreServer | None:
    """Listens at the coordinator's port; None if another rank 0 has opened it (the roll call will say so)."""
    host, port = host_and_port(member.coordinator_address)
    for _ in range(3):
        try:
            return StoreServer(interface_of(host), port, token=_FRONT_DESK_TOKEN)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ProcessGroupError(
                    f"init_process_group: rank 0 cannot listen at {member.coordinator_address}: {error}."
                    " coordinator_address must be an address of the host on which rank 0 runs."
                ) from error
            try:
                StoreClient(str(member.coordinator_address), token=_FRONT_DESK_TOKEN, timeout_s=1.0).close()
                return None
            except StoreAuthenticationError:
                break
            except StoreError:
                time.sleep(0.1)  # a process that polls may hold the port for an instant
    raise ProcessGroupError(port_in_use(member.coordinator_address))


def _visit_front_desk(member: Membership, deadline: float) -> tuple[int, Venue]:
    address = str(member.coordinator_address)
    try:
        store = StoreClient(address, token=_FRONT_DESK_TOKEN, timeout_s=left_s(deadline))
    except StoreAuthenticationError as error:
        raise ProcessGroupError(
            f"init_process_group: rank {member.rank} of {member.world_size}: {error}. Either another program uses"
            " the port, or the job there is already running and takes nobody else. Choose a free port."
        ) from error
    except StoreError as error:
        raise ProcessGroupError(
            f"init_process_group: rank {member.rank} of {member.world_size} found nobody at the coordinator: {error}."
            " Rank 0 has not started, has failed, or runs at another address; coordinator_address must be the same"
            " on all ranks and name rank 0's host."
        ) from error
    with store:
        try:
            local_rank = roll_call(store, Entry.of(member), prefix="roll", timeout_s=left_s(deadline))
            return local_rank, Venue(*store.get("venue"))
        finally:
            with contextlib.suppress(StoreError):
                store.set(f"gone/{store.add('num_gone')}", True)
