"""The job store: what it promises to many clients at once, to dying ones, and to strangers."""

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from jaxpar_launch import _store_wire
from jaxpar_launch.store import (
    StoreAuthenticationError,
    StoreClient,
    StoreError,
    StoreServer,
    StoreTimeoutError,
)

TOKEN = "the job's token"


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer("127.0.0.1", token=TOKEN) as running:
        yield running


@pytest.fixture
def client(server: StoreServer) -> Iterator[StoreClient]:
    with StoreClient(server.address, token=TOKEN, timeout_s=5) as connected:
        yield connected


@pytest.mark.parametrize(
    "value", ["text", 7, 2.5, True, [1, "a", None], {"a": {"b": []}}, b"", bytes(range(256)), "\u00fc"]
)
def test_a_value_comes_back_as_it_went_in(client: StoreClient, value: object) -> None:
    client.set("k", value)  # type: ignore[arg-type]
    assert client.get("k", 1) == value and type(client.get("k", 1)) is type(value)


def test_values_that_do_not_fit_one_reply_come_in_several(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpar_launch._store_server.MAX_FRAME_BYTES", 200_000)
    keys = [f"big/{i}" for i in range(5)]
    for i, key in enumerate(keys):
        client.set(key, bytes([i]) * 70_000)
    assert client.get_many(keys, 5) == [bytes([i]) * 70_000 for i in range(5)]


def test_a_value_over_the_limit_is_refused_and_the_client_stays_usable(client: StoreClient) -> None:
    with pytest.raises(StoreError, match=r"exceeds the limit of 67108864 bytes"):
        client.set("k", b"x" * (50 << 20))
    assert client.try_get("k") is None


def test_none_is_refused(client: StoreClient) -> None:
    with pytest.raises(ValueError, match="stands for an absent key"):
        client.set("k", None)  # type: ignore[arg-type]


def test_try_get_keys_and_delete(client: StoreClient) -> None:
    for key in ("a/2", "a/1", "b"):
        client.set(key, 0)
    assert client.keys("a/") == ["a/1", "a/2"] and client.keys() == ["a/1", "a/2", "b"]
    assert client.delete("b") and not client.delete("b") and client.try_get("b") is None
    assert client.delete_prefix("a/") == 2 and client.keys() == []


def test_compare_set_lets_the_first_decide(client: StoreClient) -> None:
    assert client.compare_set("leader", None, "a") == "a"
    assert client.compare_set("leader", None, "b") == "a"
    assert client.compare_set("leader", "a", "c") == "c"
    assert client.compare_set("absent", "a", "c") is None


def test_add_is_atomic_over_clients(server: StoreServer) -> None:
    sums: list[int] = []

    def count() -> None:
        with StoreClient(server.address, token=TOKEN, timeout_s=5) as client:
            sums.extend(client.add("n") for _ in range(50))

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(sums) == list(range(1, 401))


def test_add_to_text_is_an_error(client: StoreClient) -> None:
    client.set("k", "text")
    with pytest.raises(StoreError, match="'k' holds no whole number"):
        client.add("k")


def test_a_wait_ends_when_the_last_key_is_set(server: StoreServer, client: StoreClient) -> None:
    with StoreClient(server.address, token=TOKEN, timeout_s=5) as other:
        timers = [threading.Timer(0.05 * (i + 1), other.set, (f"k/{i}", i)) for i in range(3)]
        for timer in timers:
            timer.start()
        assert client.get_many(["k/2", "k/0", "k/1"], 5) == [2, 0, 1]
        for timer in timers:
            timer.join(5)


def test_a_wait_names_the_missing_keys_at_its_deadline(client: StoreClient) -> None:
    client.set("k/1", 1)
    start = time.monotonic()
    with pytest.raises(StoreTimeoutError, match=r"2 of 3 keys .* within 0.2 s: k/2, k/0") as caught:
        client.wait(["k/2", "k/1", "k/0"], 0.2)
    assert caught.value.missing == ("k/2", "k/0") and 0.2 <= time.monotonic() - start < 2
    client.set("k/0", 0)
    assert client.get("k/0", 1) == 0


def test_a_waiting_client_does_not_hold_up_another(server: StoreServer, client: StoreClient) -> None:
    with client.clone() as waiting:
        thread = threading.Thread(target=waiting.wait, args=(["late"], 5))
        thread.start()
        start = time.monotonic()
        for i in range(100):
            client.set("other", i)
        assert time.monotonic() - start < 2
        client.set("late", 1)
        thread.join(5)
        assert not thread.is_alive()


def test_the_server_survives_clients_that_die_in_a_wait_and_in_a_frame(server: StoreServer) -> None:
    script = (
        "import sys, threading, time; from jaxpar_launch.store import StoreClient\n"
        f"c = StoreClient({server.address!r}, token={TOKEN!r}, timeout_s=5)\n"
        "c.set('ready', 1); c.wait(['never'], 60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    with StoreClient(server.address, token=TOKEN, timeout_s=5) as client:
        client.wait(["ready"], 20)
        process.kill()
        process.wait(5)
        client.set("never", 1)  # tells a waiter whose socket is gone
        half = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        half.sendall(b"\x00\x00\x01")
        half.close()
        assert client.add("alive") == 1


def test_a_will_is_done_when_its_connection_ends_unless_somebody_was_first(
    server: StoreServer, client: StoreClient
) -> None:
    for key, before in (("gone", None), ("decided", "before"), ("revoked", None)):
        with client.clone() as other:
            other.leave_will(key, "will")
            if before:
                client.set(key, before)
            if key == "revoked":
                other.leave_will(None)
            assert client.try_get(key) == before
    assert client.get("gone", timeout_s=5) == "will"
    assert client.get("decided") == "before"
    assert client.try_get("revoked") is None


def test_a_wrong_token_is_refused_on_either_side(server: StoreServer) -> None:
    with pytest.raises(StoreAuthenticationError, match="the token is not this job's"):
        StoreClient(server.address, token="another", timeout_s=5)


def test_an_unproved_client_can_neither_ask_nor_send_much(server: StoreServer, client: StoreClient) -> None:
    for bytes_sent in (b'\x00\x00\x00\x12{"op":"keys","x":1}', b"\x7f\xff\xff\xff" + b"x" * 100):
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
            stranger.sendall(bytes_sent)
            stranger.settimeout(5)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while data := stranger.recv(4096):
                    received += data
            assert b'"keys"' not in received
    assert client.add("alive") == 1


def test_the_token_does_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[bytes] = []
    pack_frame = _store_wire.pack_frame
    for module in ("jaxpar_launch._store_client", "jaxpar_launch._store_server"):
        monkeypatch.setattr(
            f"{module}.pack_frame", lambda message: frames.append(pack_frame(message)) or frames[-1]
        )
    with StoreServer("127.0.0.1", token=TOKEN) as server:
        StoreClient(server.address, token=TOKEN, timeout_s=5).close()
    assert len(frames) == 3 and not any(TOKEN.encode() in frame for frame in frames)


def test_nothing_listening_is_an_error_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(StoreTimeoutError, match=f"nothing answers at 127.0.0.1:{port}"):
        StoreClient(f"127.0.0.1:{port}", token=TOKEN, timeout_s=0.3)
    assert 0.25 < time.monotonic() - start < 3


def test_a_server_that_starts_later_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    servers: list[StoreServer] = []
    timer = threading.Timer(0.2, lambda: servers.append(StoreServer("127.0.0.1", port, token=TOKEN)))
    timer.start()
    with StoreClient(f"127.0.0.1:{port}", token=TOKEN, timeout_s=10) as client:
        assert client.add("n") == 1
    servers[0].close()


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x00\x02{}"])
def test_something_else_at_the_address_is_named(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve() -> None:
            connection, _ = listener.accept()
            connection.sendall(says)
            time.sleep(1)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StoreAuthenticationError, match=re.escape(f"listens at {address}, but it is no")):
            StoreClient(address, token=TOKEN, timeout_s=0.5)
        thread.join(5)


def test_a_closed_server_is_an_error_and_a_restarted_one_is_found_again() -> None:
    first = StoreServer("127.0.0.1", token=TOKEN)
    port = first.port
    with StoreClient(first.address, token=TOKEN, timeout_s=5) as client:
        client.set("k", 1)
        first.close()
        first.close()
        with pytest.raises(StoreError, match="lost the store at"):
            client.set("k", 2)
        with StoreServer("127.0.0.1", port, token=TOKEN):
            assert client.try_get("k") is None


def test_a_taken_port_is_an_os_error(server: StoreServer) -> None:
    with pytest.raises(OSError, match="in use"):
        StoreServer("127.0.0.1", server.port, token=TOKEN)


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", "localhost:x", ":0", "a:70000"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not 'host:port'"):
        StoreClient(address, token=TOKEN, timeout_s=1)


def test_ipv6_addresses_round_trip() -> None:
    assert _store_wire.split_address("[::1]:29500") == ("::1", 29500)
    assert _store_wire.join_address("::1", 29500) == "[::1]:29500"
