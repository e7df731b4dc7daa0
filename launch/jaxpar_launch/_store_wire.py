"""Frames of the job store: a four-byte length, then that many bytes of JSON; and the proof of the job token.

    server -> client   {"store": "jaxpar/1", "nonce": s}
    client -> server   {"nonce": c, "proof": HMAC(token, "client" s c)}
    server -> client   {"proof": HMAC(token, "server" s c)}          or {"refused": why}, then the end
    client -> server   {"op": "set", "key": ..., "value": ...}       one request, one reply, again and again

The token itself never travels, and both sides prove that they know it. Nothing is ever unpickled.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Iterable
from typing import Any

PROTOCOL = "jaxpar/1"
MAX_FRAME_BYTES = 64 << 20
MAX_GREETING_BYTES = 4 << 10
"""Before the token is proved nobody may make the other side hold more than this."""

StoreValue = str | int | float | bool | bytes | list[Any] | dict[str, Any]
Message = dict[str, Any]


class StoreError(RuntimeError):
    """The store cannot be reached, refused a request, or is not a store."""


class StoreTimeoutError(StoreError):
    """A wait passed its deadline; `missing` holds the keys that nobody had set by then."""

    def __init__(self, message: str, *, missing: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class StoreAuthenticationError(StoreError):
    """One side does not know the job's token, or the other end is no jaxpar store at all."""


def pack_frame(message: Message, *, limit_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """One message as bytes on the wire."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=True).encode("utf-8")
    if len(body) > limit_bytes:
        raise StoreError(
            f"a store message of {len(body)} bytes exceeds the limit of {limit_bytes} bytes. The store carries"
            " small facts about a job, not arrays: send large data by a collective or a file."
        )
    return len(body).to_bytes(4, "big") + body


def take_frame(buffer: bytearray, *, limit_bytes: int = MAX_FRAME_BYTES) -> Message | None:
    """Removes one message from the front of `buffer`; None while it is not complete."""
    if len(buffer) < 4:
        return None
    size = int.from_bytes(buffer[:4], "big")
    if size > limit_bytes:
        raise StoreError(f"a store message announces {size} bytes, over the limit of {limit_bytes} bytes")
    if len(buffer) < 4 + size:
        return None
    body = bytes(buffer[4 : 4 + size])
    del buffer[: 4 + size]
    try:
        message = json.loads(body)
    except ValueError as error:
        raise StoreError("a store message is not JSON") from error
    if not isinstance(message, dict):
        raise StoreError("a store message is not a JSON object")
    return message


def to_wire(value: StoreValue) -> Message:
    """A value as JSON: bytes travel as base64 and come back as bytes."""
    if value is None:
        raise ValueError("the store does not hold None: it stands for an absent key; use delete(key)")
    if isinstance(value, bytes):
        return {"b": base64.b64encode(value).decode("ascii")}
    return {"j": value}


def from_wire(wire: Message | None) -> Any:
    """The value that `to_wire` packed; None for an absent key."""
    if wire is None:
        return None
    return base64.b64decode(wire["b"]) if "b" in wire else wire["j"]


def prove(token: str, *, role: str, server_nonce: str, client_nonce: str) -> str:
    """The proof that `role` ("client" or "server") knows the token, good for these two nonces only."""
    text = f"{PROTOCOL} {role} {server_nonce} {client_nonce}"
    return hmac.new(token.encode("utf-8"), text.encode("utf-8"), hashlib.sha256).hexdigest()


def split_address(address: str) -> tuple[str, int]:
    """ "host:port" as (host, port); an IPv6 host stands in brackets: "[::1]:29500"."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not 'host:port' with a port from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
