"""JAX's coordination services in a process of their own: run by its path, by the launcher, without importing jax.

    stdin   127.0.0.1:40123 3        a service for a world of 3 processes at that address
            127.0.0.1:40877 3        one more, for the world after it
            end of file              the launcher is gone or done

Recoverable: a process that is lost, even rank 0, does not end the others, and none waits for it when it leaves. The
quarantine's second file: `_compat.py` would bring jax, and half a second (jaxlib 0.10 to 0.12).
"""

import os
import sys

from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

HEARTBEAT_S = 100
SHUTDOWN_S = 10


def main() -> None:
    """Serves until stdin ends."""
    services = []  # an old one stays for those who have not left it
    for line in sys.stdin:
        address, world_size = line.split()
        services.append(
            _jax.get_distributed_runtime_service(
                address,
                int(world_size),
                heartbeat_timeout=HEARTBEAT_S,
                shutdown_timeout=SHUTDOWN_S,
                recoverable=True,
            )
        )
    os._exit(0)


if __name__ == "__main__":
    main()
