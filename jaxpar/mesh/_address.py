"""Addresses of the coordinator: "host:port", which interface to listen on, and whether the port is free.

127.0.0.1:29500     listen on 127.0.0.1 only
node01:29500        listen on every interface, as JAX's coordinator does
[fe80::1]:29500     the same, IPv6
"""

import ipaddress
import socket
import time

from jaxpar._errors import ProcessGroupError


def host_and_port(address: str | None) -> tuple[str, int]:
    """Host and port of a coordinator's address.

    Raises:
        ProcessGroupError: It is not "host:port".
    """
    host, colon, port = (address or "").rpartition(":")
    if not host or not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ProcessGroupError(
            f"init_process_group: coordinator_address={address!r} is not 'host:port' with a port from 1 to 65535."
            ' Write for example coordinator_address="10.0.0.1:29500".'
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def address_at(host: str, port: int) -> str:
    """The inverse of `host_and_port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def interface_of(host: str) -> str:
    """What to listen on: only this machine for a loopback address, otherwise every interface."""
    if is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    return "::" if ":" in host else ""


def loopback_of(host: str) -> str:
    """How this machine reaches what it has put on `interface_of(host)`, whatever its name resolves to."""
    return {"": "127.0.0.1", "::": "::1"}.get(interface_of(host), interface_of(host))


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_free(host: str, port: int) -> bool:
    """Whether this process could listen at the port now, on the interfaces that JAX's coordinator takes."""
    interface = interface_of(host)
    try:
        if is_loopback(host) or not socket.has_dualstack_ipv6():
            family = socket.AF_INET6 if ":" in interface else socket.AF_INET
            socket.create_server((interface, port), family=family).close()
        else:
            socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
    except OSError:
        return False
    return True


def port_in_use(address: str | None) -> str:
    """The message for a coordinator's port that is taken."""
    return (
        f"init_process_group: rank 0 cannot listen at the coordinator's address {address}: the port is in use,"
        " perhaps by an earlier run that has not ended. Choose another coordinator_address (or --master-port);"
        " jaxpar-launch finds a free port by itself."
    )


def left_s(deadline: float) -> float:
    """Seconds until a deadline of `time.monotonic()`; never negative."""
    return max(0.0, deadline - time.monotonic())
