"""The server of a job store: one thread, one selector, many clients that may die at any moment.

    listener --accept--> client: greeting -> proof -> requests ... -> closed or broken
                                                |
                               StoreTable (one thread, so every operation is atomic)

A wait is not answered until its keys are there or its deadline has passed; no other client notices. A client
that breaks the protocol, or does not prove the token in time, is dropped.
"""

import contextlib
import hmac
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Self

from jaxpar_launch._store_table import StoreTable, Waiter
from jaxpar_launch._store_wire import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    PROTOCOL,
    Message,
    StoreError,
    join_address,
    pack_frame,
    prove,
    take_frame,
)

GREETING_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 18


@dataclass(eq=False)
class _Client:
    """One connection: bytes not yet understood, bytes not yet sent, the wait it is in, and what is to be set when it ends."""

    socket: socket.socket
    nonce: str
    greeting_deadline: float
    is_trusted: bool = False
    is_refused: bool = False
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    waiter: Waiter | None = None
    will: tuple[str, Any] | None = None


class StoreServer:
    """Keys and values that all processes of one job share; serves from its own thread until closed.

    Args:
        host: the interface to listen on: "127.0.0.1" for one machine, "" for every interface.
        port: the port to listen on; 0 takes a free one.
        token: the job's secret; clients must prove that they know it.

    Raises:
        OSError: the port is taken or the host is not this machine's.

    Example:
        >>> from jaxpar_launch.store import StoreClient, StoreServer
        >>> with StoreServer("127.0.0.1", token="secret") as server:
        ...     with StoreClient(server.address, token="secret", timeout_s=5) as client:
        ...         client.set("rank/0", {"host": "a"})
        ...         client.get("rank/0", timeout_s=1)
        {'host': 'a'}
    """

    def __init__(self, host: str, port: int = 0, *, token: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # A deep backlog: all processes of a large job may knock in the same millisecond.
        self._listener = socket.create_server((host, port), family=family, backlog=4096)
        self._listener.setblocking(False)
        self._host = host
        self._token = token
        self._table = StoreTable()
        self._clients: set[_Client] = set()
        self._strangers: set[_Client] = set()  # connected, token not yet proved
        self._wake_read, self._wake_write = socket.socketpair()
        self._is_closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="jaxpar-store", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._listener.getsockname()[1]

    @property
    def address(self) -> str:
        """Where clients find it, as "host:port"; a server on every interface gives this machine's name."""
        host = socket.gethostname() if self._host in ("", "0.0.0.0", "::") else self._host
        return join_address(host, self.port)

    def close(self) -> None:
        """Ends the thread and every connection. Safe to call twice."""
        if not self._is_closing.is_set():
            self._is_closing.set()
            with contextlib.suppress(OSError):
                self._wake_write.send(b"x")
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The loop ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closing.is_set():
                for key, events in self._selector.select(self._patience_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, _Client):
                        self._advance(key.data, events)
                now = time.monotonic()
                self._table.expire(now)
                self._drop_silent(now)
        finally:
            self._release()

    def _patience_s(self) -> float | None:
        deadlines = [client.greeting_deadline for client in self._strangers]
        if (deadline := self._table.next_deadline()) is not None:
            deadlines.append(deadline)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client gave up before we looked, or no file descriptor is left
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(connection, secrets.token_hex(16), time.monotonic() + GREETING_TIMEOUT_S)
        self._clients.add(client)
        self._strangers.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._send(client, {"store": PROTOCOL, "nonce": client.nonce})

    def _advance(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ:
                self._read(client)
        except (OSError, StoreError):
            self._drop(client)

    def _read(self, client: _Client) -> None:
        data = client.socket.recv(_READ_BYTES)
        if not data:
            raise StoreError("the client closed the connection")
        client.inbox += data
        limit_bytes = MAX_FRAME_BYTES if client.is_trusted else MAX_GREETING_BYTES
        while client.waiter is None and (message := take_frame(client.inbox, limit_bytes=limit_bytes)):
            self._handle(client, message)
        if len(client.inbox) > MAX_FRAME_BYTES + 4:
            raise StoreError("the client sends without reading its replies")

    def _send(self, client: _Client, message: Message) -> None:
        client.outbox += pack_frame(message)
        with contextlib.suppress(OSError):  # a dead client is dropped when its socket is next read
            self._flush(client)

    def _flush(self, client: _Client) -> None:
        with contextlib.suppress(BlockingIOError):
            while client.outbox:
                del client.outbox[: client.socket.send(client.outbox)]
        if client.is_refused and not client.outbox:
            raise StoreError("the client was refused")
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outbox else 0)
        self._selector.modify(client.socket, events, client)

    def _drop(self, client: _Client) -> None:
        if client.waiter is not None:
            self._table.forget(client.waiter)
        if client.will is not None and not self._is_closing.is_set():
            (key, value), client.will = client.will, None
            self._table.compare_set(key, None, value)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        self._clients.discard(client)
        self._strangers.discard(client)
        client.socket.close()

    def _drop_silent(self, now: float) -> None:
        for client in [c for c in self._strangers if c.greeting_deadline <= now]:
            self._drop(client)

    def _release(self) -> None:
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()
        for end in (self._listener, self._wake_read, self._wake_write):
            end.close()

    # The requests --------------------------------------------------------------------------------------

    def _handle(self, client: _Client, message: Message) -> None:
        if not client.is_trusted:
            self._greet(client, message)
            return
        try:
            reply = self._answer(client, message)
        except (KeyError, TypeError, ValueError) as error:
            reply = {"error": f"malformed request {message.get('op')!r}: {error!r}"}
        if reply is not None:
            self._send(client, reply)

    def _greet(self, client: _Client, message: Message) -> None:
        client_nonce = str(message.get("nonce", ""))

        def proof(role: str) -> str:
            return prove(self._token, role=role, server_nonce=client.nonce, client_nonce=client_nonce)

        if hmac.compare_digest(str(message.get("proof", "")).encode(), proof("client").encode()):
            client.is_trusted = True
            self._strangers.discard(client)
            self._send(client, {"proof": proof("server")})
        else:
            client.is_refused = True
            self._send(client, {"refused": "the token is not this job's"})

    def _answer(self, client: _Client, message: Message) -> Message | None:
        table = self._table
        match message["op"]:
            case "set":
                table.set(message["key"], message["value"])
                return {}
            case "add":
                return self._add(message["key"], int(message["amount"]))
            case "compare_set":
                held = table.compare_set(message["key"], message["expected"], message["value"])
                return {"value": held}
            case "read":
                return {"values": self._values_that_fit(message["keys"])}
            case "keys":
                return {"keys": table.keys(message["prefix"])}
            case "will":
                client.will = None if message["key"] is None else (str(message["key"]), message["value"])
                return {}
            case "delete":
                return {"count": table.delete(message["keys"])}
            case "delete_prefix":
                return {"count": table.delete(table.keys(message["prefix"]))}
            case "wait":
                self._wait(client, tuple(message["keys"]), float(message["timeout_s"]))
                return None
        return {"error": f"unknown operation {message['op']!r}"}

    def _add(self, key: str, amount: int) -> Message:
        held = self._table.get(key) or {"j": 0}
        if not isinstance(held.get("j"), int):
            return {"error": f"add: {key!r} holds no whole number"}
        self._table.set(key, {"j": held["j"] + amount})
        return {"value": held["j"] + amount}

    def _values_that_fit(self, keys: list[str]) -> list[Any]:
        """The values of the first keys, as many as one frame holds; the client asks again for the rest."""
        values: list[Any] = []
        room_bytes = MAX_FRAME_BYTES - (1 << 10)
        for key in keys:
            value = self._table.get(key)
            room_bytes -= len(pack_frame({"value": value}))
            if values and room_bytes < 0:
                break
            values.append(value)
        return values

    def _wait(self, client: _Client, keys: tuple[str, ...], timeout_s: float) -> None:
        def done(missing: list[str]) -> None:
            client.waiter = None
            self._send(client, {"missing": missing})

        client.waiter = Waiter(keys, set(), time.monotonic() + timeout_s, done)
        self._table.wait(client.waiter)
