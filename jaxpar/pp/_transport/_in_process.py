"""Between devices of one process: the runtime copies, in its own time."""

from collections.abc import Sequence

import jax

from jaxpar.pp._transport._protocol import Arrival, Hop, Leaves


class DeviceCopies:
    """`jax.device_put` from the devices of one rank to those of another."""

    def move(self, values: Leaves | None, hop: Hop, wanted: Sequence[jax.ShapeDtypeStruct]) -> Arrival:
        """Begins the copies at once."""
        assert values is not None, f"this process has all devices, so it has the {hop.what}"
        copies = jax.device_put(values, [w.sharding for w in wanted])
        return lambda: copies

    def wait(self, values: Leaves | None = None) -> None:
        """Waits for arrays; copies need nobody else."""
        for x in values or ():
            if not x.is_deleted():
                x.block_until_ready()
