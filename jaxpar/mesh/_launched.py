"""What the launcher said of this process, in the words of the process group."""

from dataclasses import dataclass

from jaxpar.mesh._group import Membership, Venue


@dataclass(frozen=True)
class Launched:
    """A process that a launcher started: its place, and the launcher's store."""

    member: Membership
    venue: Venue


def launched() -> Launched | None:
    """None if no launcher started this process."""
    return None
