"""A meeting place that outlives any host of the job: etcd, through its HTTP gateway, with the operations of a store's client.

    --rdzv-backend etcd --rdzv-endpoint etcd0:2379,etcd1:2379

    set, try_get, keys, delete_prefix    kv/put, kv/range, kv/deleterange         under /jaxpar/<rdzv-id>/
    compare_set                          kv/txn
    get, get_many, wait                  kv/range until it is there: etcd's watch needs a stream for each waiter
    leave_will                           nothing: etcd forgets a key when its owner dies, but sets none; beats tell instead

Requests, and what TLS and passwords add to them: `_etcd_http.py`.
"""

import base64
import copy
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from jaxpar_launch._etcd_access import EtcdAccess
from jaxpar_launch._etcd_http import PATIENCE_S, Gateway, Json
from jaxpar_launch.store import StoreTimeoutError, StoreValue

_LOOK_S = 0.05


class EtcdClient:
    """A connection to etcd, with what a meeting of launchers uses of a store's client.

    Args:
        endpoints: "host:port" of one or more etcd servers.
        prefix: before all keys.
        timeout_s: how long to try to connect; later requests have 20 s, in which etcd may choose a new leader.
        access: how it is spoken to, and as whom; None: plain HTTP, as nobody.
        meanwhile: called between two tries; what it raises ends them.

    Raises:
        StoreTimeoutError: no etcd answered in time.
        StoreAuthenticationError: a certificate, user or password is not accepted.
        LaunchSpecError: there is no password, or a file is no certificate.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str,
        timeout_s: float,
        access: EtcdAccess | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._prefix, self._timeout_s = prefix, min(timeout_s, PATIENCE_S)
        self._gateway = Gateway(endpoints, access or EtcdAccess(), timeout_s=timeout_s, meanwhile=meanwhile)
        try:
            self.try_get("hello")
        except BaseException:
            self.close()
            raise

    def clone(self) -> "EtcdClient":
        """Another connection, for another thread."""
        other = copy.copy(self)
        other._gateway = self._gateway.clone()
        return other

    def close(self) -> None:
        """Ends the connection."""
        self._gateway.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self, key: str, value: StoreValue) -> None:
        """Sets a key, whatever it held."""
        self._gateway.ask("kv/put", {"key": self._key(key), "value": _packed(value)})

    def try_get(self, key: str) -> Any:
        """The value of a key now, or None."""
        found = self._gateway.ask("kv/range", {"key": self._key(key)}).get("kvs", [])
        return _unpacked(found[0]["value"]) if found else None

    def compare_set(self, key: str, expected: StoreValue | None, value: StoreValue) -> Any:
        """Sets a key if it holds what is expected (None: is absent); returns what it holds then."""
        name = self._key(key)
        condition: Json = {"key": name, "result": "EQUAL"}
        if expected is None:
            condition |= {"target": "CREATE", "create_revision": "0"}
        else:
            condition |= {"target": "VALUE", "value": _packed(expected)}
        answer = self._gateway.ask(
            "kv/txn",
            {
                "compare": [condition],
                "success": [{"request_put": {"key": name, "value": _packed(value)}}],
                "failure": [{"request_range": {"key": name}}],
            },
        )
        if answer.get("succeeded"):
            return json.loads(json.dumps(value))
        found = answer["responses"][0]["response_range"].get("kvs", [])
        return _unpacked(found[0]["value"]) if found else None

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Waits until all keys are set.

        Raises:
            StoreTimeoutError: with the keys that are missing.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        until = time.monotonic() + timeout_s
        missing = list(keys)
        while missing := [key for key in missing if self.try_get(key) is None]:
            if time.monotonic() >= until:
                raise StoreTimeoutError(
                    f"{len(missing)} of {len(keys)} keys were not set in etcd within {timeout_s:g} s: {', '.join(missing[:8])}",
                    missing=missing,
                )
            time.sleep(_LOOK_S)

    def get(self, key: str, timeout_s: float | None = None) -> Any:
        """The value of a key, once it is set.

        Raises:
            StoreTimeoutError: nobody set it in time.
        """
        self.wait([key], timeout_s)
        return self.try_get(key)

    def leave_will(self, key: str | None, value: StoreValue = True) -> None:
        """Nothing: etcd has no wills."""

    def keys(self, prefix: str = "") -> list[str]:
        """The keys with a prefix, sorted."""
        found = self._gateway.ask("kv/range", self._range(prefix) | {"keys_only": True}).get("kvs", [])
        return sorted(_text(kv["key"]).removeprefix(self._prefix) for kv in found)

    def delete_prefix(self, prefix: str) -> int:
        """Removes the keys with a prefix; returns how many."""
        return int(self._gateway.ask("kv/deleterange", self._range(prefix)).get("deleted", 0))

    def _key(self, key: str) -> str:
        return base64.b64encode((self._prefix + key).encode()).decode()

    def _range(self, prefix: str) -> Json:
        start = (self._prefix + prefix).encode()
        end = start[:-1] + bytes([start[-1] + 1])
        return {"key": base64.b64encode(start).decode(), "range_end": base64.b64encode(end).decode()}


def _packed(value: StoreValue) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return base64.b64encode(text.encode()).decode()


def _unpacked(value: str) -> Any:
    return json.loads(base64.b64decode(value))


def _text(value: str) -> str:
    return base64.b64decode(value).decode()
