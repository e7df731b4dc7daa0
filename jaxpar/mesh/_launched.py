"""What the launcher said of this process, in the words of the process group.

WorkerEnv   rank, world_size, local_rank, coordinator   -> Membership
            store, store_token, restart_count           -> Venue: one part of the store for each attempt
            recovery, restart_count                     -> the first world of a job that recovers in place
"""

from dataclasses import dataclass

from jaxpar._errors import ProcessGroupError
from jaxpar.mesh._group import Membership, Venue
from jaxpar_launch.env import WorkerEnv


@dataclass(frozen=True)
class Launched:
    """The place of a process that a launcher started, and the launcher's store (None: rank 0 has to host one).

    `recovery` is the address of a coordination service that the launcher keeps, if lost workers are replaced in place.
    """

    member: Membership
    venue: Venue | None
    restart_count: int = 0
    recovery: str | None = None


def launched() -> Launched | None:
    """None if no launcher started this process.

    Raises:
        ProcessGroupError: The environment is half a worker's.
    """
    try:
        environment = WorkerEnv.from_environ()
    except ValueError as error:
        raise ProcessGroupError(f"init_process_group: {error}") from error
    if environment is None:
        return None
    member = Membership(
        environment.rank,
        environment.world_size,
        local_rank=environment.local_rank,
        coordinator_address=environment.coordinator,
        local_device_ids=environment.local_device_ids,
    )
    if environment.store is None:
        return Launched(member, None)
    token = environment.store_token or ""
    number = environment.restart_count
    return Launched(member, venue_of_attempt(environment.store, token, number), number, environment.recovery)


def venue_of_attempt(store: str, token: str, number: int) -> Venue:
    """The part of the launcher's store that is this attempt's."""
    return Venue(store, token, f"attempt/{number}")
