"""By which address the other processes of the job reach this one.

coordinator at 10.0.0.1:29500     the interface from which this machine reaches 10.0.0.1
coordinator at 127.0.0.1:29500    127.0.0.1: all processes are on this machine
"""

import socket

from jaxpar.mesh._address import host_and_port
from jaxpar.mesh._process_group import current_group


def own_host() -> str:
    """The address of the interface that leads to the job's coordinator; loopback in a world of one."""
    address = current_group().membership.coordinator_address
    if address is None:
        return "127.0.0.1"
    family, kind, protocol, _, target = socket.getaddrinfo(*host_and_port(address), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # chooses the interface; a datagram socket sends nothing
        return str(probe.getsockname()[0])
