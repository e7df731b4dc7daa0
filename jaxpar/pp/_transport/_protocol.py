"""What every transport offers: move arrays from one rank of a pipeline to another, and wait no longer than allowed.

    process of rank 0     move([f32[2, 8]], Hop(0, 1, ...), wanted)   gives the values
    process of rank 1     move(None, Hop(0, 1, ...), wanted)()        takes them, when it needs them
    any other process     does not call

All processes make the moves in which they take part in one order, that of the program; nothing else is agreed on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

Leaves = list[Any]
Arrival = Callable[[], Leaves]


@dataclass(frozen=True)
class Hop:
    """Args:
    source: rank that has the arrays.
    target: rank that wants them.
    what: in words, for messages: "activations of microbatch 3, from stage 0 to stage 1".
    """

    source: int
    target: int
    what: str


class Transport(Protocol):
    """Moves arrays between ranks."""

    def move(self, values: Leaves | None, hop: Hop, wanted: Sequence[jax.ShapeDtypeStruct]) -> Arrival:
        """Begins to move arrays; does not wait for the other rank.

        Args:
            values: the arrays, on the devices of the source; None in a process that has no device of it.
            hop: from where to where.
            wanted: their global shapes, dtypes, and shardings at the target; per device the same as at the source.

        Returns:
            A function that gives the arrays at the target, in a process that has devices of it.
        """
        ...

    def wait(self, values: Leaves | None = None) -> None:
        """Waits until arrays are computed; without any, until all that was received is there.

        Raises:
            ProcessGroupError: something that they need did not come in time, or the rank that should send it is lost.
        """
        ...
