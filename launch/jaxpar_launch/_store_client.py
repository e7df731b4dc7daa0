"""The client of a job store: one connection, one request at a time, every call with a deadline.

    set / get / try_get / get_many     values: JSON or bytes
    add / compare_set                  atomic: counters, and "the first one decides"
    wait                               until keys are there; the error lists those that are not
    keys / delete / delete_prefix      by prefix
    leave_will                         what the server sets when this connection ends

A wait holds the connection, so give each thread its own client.
"""

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from jaxpar_launch._store_wire import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    PROTOCOL,
    Message,
    StoreAuthenticationError,
    StoreError,
    StoreTimeoutError,
    StoreValue,
    from_wire,
    pack_frame,
    prove,
    split_address,
    take_frame,
    to_wire,
)

_GRACE_S = 5.0
"""How much longer than a wait's own deadline the client listens before it calls the server unresponsive."""
_FIRST_PAUSE_S, _LAST_PAUSE_S, _DIAL_S = 0.01, 0.25, 3.0


class StoreClient:
    """A connection to the store of a job.

    Args:
        address: "host:port" of the server; it may start later than the client.
        token: the job's secret.
        timeout_s: how long to try to connect, and the deadline of every request that has none of its own.
        meanwhile: called between two tries to connect; what it raises ends them.

    Raises:
        StoreTimeoutError: nothing listened at the address within `timeout_s`.
        StoreAuthenticationError: the tokens differ, or what listens there is no jaxpar store.

    Example:
        >>> from jaxpar_launch.store import StoreClient, StoreServer
        >>> with StoreServer("127.0.0.1", token="t") as server:
        ...     with StoreClient(server.address, token="t", timeout_s=5) as client:
        ...         client.add("arrived", 1), client.compare_set("leader", None, "rank 3")
        (1, 'rank 3')
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        split_address(address)
        self.address = address
        self._token = token
        self._timeout_s, self._meanwhile = timeout_s, meanwhile
        self._lock = threading.Lock()
        self._inbox = bytearray()
        self._socket: socket.socket | None = None
        self._connect(time.monotonic() + timeout_s)

    def clone(self, *, timeout_s: float | None = None) -> "StoreClient":
        """Another connection to the same store: for another thread, or with another patience."""
        patience_s = self._timeout_s if timeout_s is None else timeout_s
        return StoreClient(self.address, token=self._token, timeout_s=patience_s)

    def close(self) -> None:
        """Ends the connection. Safe to call twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._inbox.clear()

    def interrupt(self) -> None:
        """Makes the request that another thread waits in fail now; later ones connect again."""
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The operations ------------------------------------------------------------------------------------

    def set(self, key: str, value: StoreValue) -> None:
        """Sets `key`, whatever it held."""
        self._request({"op": "set", "key": key, "value": to_wire(value)})

    def get(self, key: str, timeout_s: float | None = None) -> Any:
        """The value of `key`, once it is set.

        Raises:
            StoreTimeoutError: nobody set it within `timeout_s`.
        """
        return self.get_many([key], timeout_s)[0]

    def get_many(self, keys: Sequence[str], timeout_s: float | None = None) -> list[Any]:
        """The values of all `keys`, once all are set, in the order given."""
        self.wait(keys, timeout_s)
        values: list[Any] = []
        while len(values) < len(keys):
            values += self._request({"op": "read", "keys": list(keys[len(values) :])})["values"]
        return [from_wire(value) for value in values]

    def try_get(self, key: str) -> Any:
        """The value of `key` now, or None."""
        return from_wire(self._request({"op": "read", "keys": [key]})["values"][0])

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a whole number that starts at 0, atomically. Returns the sum."""
        return from_wire({"j": self._request({"op": "add", "key": key, "amount": amount})["value"]})

    def compare_set(self, key: str, expected: StoreValue | None, value: StoreValue) -> Any:
        """Sets `key` to `value` if it holds `expected` (None: is absent), atomically.

        Returns:
            What `key` holds afterwards: `value` if this call (or an equal one) won; None if it was expected
            to hold something and is absent.
        """
        wanted = None if expected is None else to_wire(expected)
        message = {"op": "compare_set", "key": key, "expected": wanted, "value": to_wire(value)}
        return from_wire(self._request(message)["value"])

    def leave_will(self, key: str | None, value: StoreValue = True) -> None:
        """Has the server set `key`, unless somebody has, when this connection ends; None: nothing.

        So a process that is killed is missed at once. One will for each connection; a new one replaces it.
        """
        self._request({"op": "will", "key": key, "value": to_wire(value)})

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Waits until every key is set.

        Raises:
            StoreTimeoutError: with the keys still `missing` after `timeout_s`.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        message = {"op": "wait", "keys": list(keys), "timeout_s": timeout_s}
        if missing := self._request(message, timeout_s=timeout_s)["missing"]:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise StoreTimeoutError(
                f"{len(missing)} of {len(keys)} keys were not set in the store at {self.address} within"
                f" {timeout_s:g} s: {shown}",
                missing=missing,
            )

    def keys(self, prefix: str = "") -> list[str]:
        """The keys that start with `prefix`, sorted."""
        return self._request({"op": "keys", "prefix": prefix})["keys"]

    def delete(self, key: str) -> bool:
        """Removes `key`. Returns whether it was there."""
        return self._request({"op": "delete", "keys": [key]})["count"] > 0

    def delete_prefix(self, prefix: str) -> int:
        """Removes every key that starts with `prefix`. Returns how many."""
        return self._request({"op": "delete_prefix", "prefix": prefix})["count"]

    # The connection ------------------------------------------------------------------------------------

    def _request(self, message: Message, *, timeout_s: float | None = None) -> Message:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        frame = pack_frame(message)
        with self._lock:
            deadline = time.monotonic() + timeout_s + _GRACE_S
            if self._socket is None:
                self._connect(deadline)
            try:
                reply = self._exchange(frame, deadline)
            except (OSError, StoreError) as error:
                # The reply may still be on its way: after an error this connection cannot be trusted.
                self.close()
                if isinstance(error, StoreError):
                    raise
                raise StoreError(f"lost the store at {self.address}: {error}") from error
        if "error" in reply:
            raise StoreError(f"the store at {self.address} refused: {reply['error']}")
        return reply

    def _exchange(self, frame: bytes, deadline: float) -> Message:
        assert self._socket is not None
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        self._socket.sendall(frame)
        return self._receive(deadline, limit_bytes=MAX_FRAME_BYTES)

    def _receive(self, deadline: float, *, limit_bytes: int) -> Message:
        assert self._socket is not None
        while (message := take_frame(self._inbox, limit_bytes=limit_bytes)) is None:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._socket.recv(1 << 18)
            except TimeoutError as error:
                raise StoreTimeoutError(f"the store at {self.address} does not answer") from error
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._inbox += data
        return message

    def _connect(self, deadline: float) -> None:
        """Tries until the deadline: the server may not have started, or restarts."""
        pause_s, why = _FIRST_PAUSE_S, "no time was left to try"
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                self._socket = self._dial(min(left_s, _DIAL_S))
                self._greet(deadline)
                return
            except OSError as error:
                self.close()
                why = str(error)
            except BaseException:
                self.close()
                raise
            self._meanwhile()
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        raise StoreTimeoutError(f"nothing answers at {self.address}: {why}")

    def _dial(self, timeout_s: float) -> socket.socket:
        connection = socket.create_connection(split_address(self.address), timeout=timeout_s)
        if connection.getsockname() == connection.getpeername():
            # Linux may connect a socket to itself when nobody listens on a port of the ephemeral range.
            connection.close()
            raise ConnectionRefusedError("nobody listens there")
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _greet(self, deadline: float) -> None:
        assert self._socket is not None
        try:
            greeting = self._receive(deadline, limit_bytes=MAX_GREETING_BYTES)
        except StoreError as error:
            raise self._stranger() from error
        if greeting.get("store") != PROTOCOL:
            raise self._stranger()
        nonces = {"server_nonce": str(greeting["nonce"]), "client_nonce": secrets.token_hex(16)}
        proof = prove(self._token, role="client", **nonces)
        reply = self._exchange(pack_frame({"nonce": nonces["client_nonce"], "proof": proof}), deadline)
        if "refused" in reply:
            raise StoreAuthenticationError(f"the store at {self.address} refused: {reply['refused']}")
        expected = prove(self._token, role="server", **nonces)
        if not hmac.compare_digest(str(reply.get("proof", "")).encode(), expected.encode()):
            raise StoreAuthenticationError(f"what listens at {self.address} does not know this job's token")

    def _stranger(self) -> StoreAuthenticationError:
        return StoreAuthenticationError(f"something listens at {self.address}, but it is no {PROTOCOL} store")
