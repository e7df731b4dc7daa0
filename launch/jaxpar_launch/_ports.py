"""Ports that no one else gets: reserved by the launcher, usable by its worker.

    launcher   bind 127.0.0.1:P, SO_REUSEADDR, never listen    <- held while the round lasts
    rank 0     bind [::]:P,      SO_REUSEADDR, listen          <- allowed: the holder does not listen
    others     bind to port 0                                  <- the kernel hands out other ports

So two launches at the same moment never draw the same port, and nobody slips in between drawing it and its
use. Two launches that *name* the same port could both hold it in this way; a UDP socket of the same number,
which cannot be shared, is the lock between them.
"""

import contextlib
import errno
import socket
from dataclasses import dataclass

from jaxpar_launch._errors import LaunchSpecError
from jaxpar_launch.env import join_address


@dataclass(frozen=True)
class PortReservation:
    """A TCP port held for a worker until `close`."""

    host: str
    port: int
    holders: tuple[socket.socket, ...]

    @classmethod
    def draw(cls, host: str) -> "PortReservation":
        """Reserves a free port on `host`."""
        return cls._hold(host, 0)

    @classmethod
    def claim(cls, host: str, port: int) -> "PortReservation":
        """Reserves the given port on `host`.

        Raises:
            LaunchSpecError: another process has it; the message holds host:port and "in use".
        """
        return cls._hold(host, port)

    def close(self) -> None:
        """Lets go of the port."""
        for holder in self.holders:
            holder.close()

    @classmethod
    def _hold(cls, host: str, port: int) -> "PortReservation":
        with contextlib.ExitStack() as on_error:
            try:
                family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                tcp = on_error.enter_context(socket.socket(family, socket.SOCK_STREAM))
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tcp.bind(address)
                holders = [tcp]
                if port != 0:
                    holders.append(on_error.enter_context(socket.socket(family, socket.SOCK_DGRAM)))
                    holders[1].bind(address)
            except OSError as error:
                raise _port_error(host, port, error) from error
            on_error.pop_all()
        return cls(host, tcp.getsockname()[1], tuple(holders))


def _port_error(host: str, port: int, error: OSError) -> LaunchSpecError:
    address = join_address(host, port)
    if error.errno == errno.EADDRINUSE:
        return LaunchSpecError(
            f"--master-port {port}: {address} is in use by another process, perhaps a job that is still running. "
            "Leave --master-port out to get a free port, or name another one."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return LaunchSpecError(
            f"--master-port {port}: this user may not listen on {address}. Take one above 1023."
        )
    return LaunchSpecError(
        f"--master-addr {host} is not an address of this host ({error}). One host's workers meet on "
        "--master-addr 127.0.0.1, the default."
    )
