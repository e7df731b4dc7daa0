"""Coordinator addresses: which are accepted, what is listened on."""

import socket

import pytest

from jaxpar._errors import ProcessGroupError
from jaxpar.mesh._address import address_at, host_and_port, interface_of, is_free


@pytest.mark.parametrize("address", [None, "", "host", "host:", ":1", "host:0", "host:70000", "host:x"])
def test_a_malformed_address_is_refused(address: str | None) -> None:
    with pytest.raises(ProcessGroupError, match="is not 'host:port' with a port from 1 to 65535"):
        host_and_port(address)


@pytest.mark.parametrize(
    ("address", "host", "interface"),
    [
        ("127.0.0.1:5", "127.0.0.1", "127.0.0.1"),
        ("localhost:5", "localhost", "127.0.0.1"),
        ("[::1]:5", "::1", "::1"),
        ("node01:5", "node01", ""),
        ("10.0.0.1:5", "10.0.0.1", ""),
        ("[fe80::1]:5", "fe80::1", "::"),
    ],
)
def test_loopback_stays_on_this_machine(address: str, host: str, interface: str) -> None:
    assert host_and_port(address) == (host, 5) and address_at(host, 5) == address
    assert interface_of(host) == interface


def test_a_port_is_free_until_someone_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not is_free("127.0.0.1", port) and not is_free("localhost", port)
    assert is_free("127.0.0.1", port) and is_free("node01", port)
