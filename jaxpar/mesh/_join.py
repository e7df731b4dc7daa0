"""Joining a job: find the store, call the roll, then start `jax.distributed`.

    launched              store and token from the launcher             --> roll call --> coordinator
    explicit, Slurm ...   front desk at the coordinator's own port, a store on rank 0  --> coordinator

JAX's own failures here are SIGSEGV and SIGABRT without an exception (port in use, nothing listening, a missing or
doubled rank) or go unnoticed (two world sizes), so all that is settled before JAX is asked.
"""

import dataclasses
import time

from jaxpar._errors import ProcessGroupError
from jaxpar.mesh._address import left_s
from jaxpar.mesh._coordinator import start_jax
from jaxpar.mesh._front_desk import meet_at_front_desk
from jaxpar.mesh._group import Membership, Patience, ProcessGroup, Venue
from jaxpar.mesh._roll_call import Entry, roll_call
from jaxpar_launch.store import StoreClient, StoreError, StoreServer


def join(member: Membership, patience: Patience, *, venue: Venue | None) -> ProcessGroup:
    """Meets the other processes and starts `jax.distributed`.

    Args:
        member: Who this process is.
        patience: Deadlines.
        venue: The launcher's store; None if rank 0 has to host one.

    Raises:
        ProcessGroupError: Someone is missing, doubled or different, or the coordinator's port cannot be used.
    """
    deadline = time.monotonic() + patience.timeout_s
    hosted: StoreServer | None = None
    try:
        if venue is None:
            local_rank, venue, hosted = meet_at_front_desk(member, deadline)
            store = StoreClient(venue.address, token=venue.token, timeout_s=left_s(deadline))
        else:
            store = StoreClient(venue.address, token=venue.token, timeout_s=left_s(deadline))
            local_rank = roll_call(
                store, Entry.of(member), prefix=f"{venue.prefix}/roll", timeout_s=left_s(deadline)
            )
        start_jax(member, patience, store, venue.prefix, deadline)
    except StoreError as error:
        raise ProcessGroupError(
            f"init_process_group: rank {member.rank} of {member.world_size} cannot meet the others: {error}"
        ) from error
    if member.local_rank is None:
        member = dataclasses.replace(member, local_rank=local_rank)
    return ProcessGroup(
        member,
        timeout_s=patience.timeout_s,
        shutdown_timeout_s=patience.shutdown_timeout_s,
        store=store,
        hosted=hosted,
        prefix=venue.prefix,
    )
