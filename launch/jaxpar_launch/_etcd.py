"""A meeting place that outlives any host of the job: etcd, through its HTTP gateway, with the operations of a store's client.

    --rdzv-backend etcd --rdzv-endpoint etcd0:2379,etcd1:2379

    set, try_get, keys, delete_prefix    kv/put, kv/range, kv/deleterange         under /jaxpar/<rdzv-id>/
    compare_set                          kv/txn
    get, get_many, wait                  kv/range until it is there: etcd's watch needs a stream for each waiter
    leave_will                           nothing: etcd forgets a key when its owner dies, but sets none; beats tell instead

Requests that find one etcd dead go to the next. No TLS, no password: keep it on the cluster's own network.
"""

import base64
import http.client
import json
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

from jaxpar_launch.env import split_address
from jaxpar_launch.store import StoreError, StoreTimeoutError, StoreValue

_LOOK_S = 0.05
_REQUEST_S, _PATIENCE_S = 5.0, 20.0
Json = dict[str, Any]


class EtcdClient:
    """A connection to etcd, with what a meeting of launchers uses of a store's client.

    Args:
        endpoints: "host:port" of one or more etcd servers.
        prefix: before all keys.
        timeout_s: how long to try to connect; later requests have 20 s, in which etcd may choose a new leader.

    Raises:
        StoreTimeoutError: no etcd answered in time.
    """

    def __init__(self, endpoints: Sequence[str], *, prefix: str, timeout_s: float) -> None:
        self._endpoints, self._prefix, self._timeout_s = tuple(endpoints), prefix, timeout_s
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._current = 0
        self.try_get("hello")
        self._timeout_s = min(timeout_s, _PATIENCE_S)

    def clone(self) -> "EtcdClient":
        """Another connection, for another thread."""
        return EtcdClient(self._endpoints, prefix=self._prefix, timeout_s=self._timeout_s)

    def close(self) -> None:
        """Ends the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self, key: str, value: StoreValue) -> None:
        """Sets a key, whatever it held."""
        self._ask("kv/put", {"key": self._key(key), "value": _packed(value)})

    def try_get(self, key: str) -> Any:
        """The value of a key now, or None."""
        found = self._ask("kv/range", {"key": self._key(key)}).get("kvs", [])
        return _unpacked(found[0]["value"]) if found else None

    def compare_set(self, key: str, expected: StoreValue | None, value: StoreValue) -> Any:
        """Sets a key if it holds what is expected (None: is absent); returns what it holds then."""
        name = self._key(key)
        condition: Json = {"key": name, "result": "EQUAL"}
        if expected is None:
            condition |= {"target": "CREATE", "create_revision": "0"}
        else:
            condition |= {"target": "VALUE", "value": _packed(expected)}
        answer = self._ask(
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
        found = self._ask("kv/range", self._range(prefix) | {"keys_only": True}).get("kvs", [])
        return sorted(_text(kv["key"]).removeprefix(self._prefix) for kv in found)

    def delete_prefix(self, prefix: str) -> int:
        """Removes the keys with a prefix; returns how many."""
        return int(self._ask("kv/deleterange", self._range(prefix)).get("deleted", 0))

    def _key(self, key: str) -> str:
        return base64.b64encode((self._prefix + key).encode()).decode()

    def _range(self, prefix: str) -> Json:
        start = (self._prefix + prefix).encode()
        end = start[:-1] + bytes([start[-1] + 1])
        return {"key": base64.b64encode(start).decode(), "range_end": base64.b64encode(end).decode()}

    def _ask(self, what: str, message: Json) -> Json:
        """One request, of the first etcd that answers."""
        body, why = json.dumps(message), "no time was left to try"
        until = time.monotonic() + self._timeout_s
        with self._lock:
            while time.monotonic() < until:
                try:
                    return self._exchange(what, body)
                except (OSError, http.client.HTTPException) as error:
                    why = f"{self._endpoints[self._current]}: {error or type(error).__name__}"
                    self.close()
                    self._current = (self._current + 1) % len(self._endpoints)
                    time.sleep(_LOOK_S)
        raise StoreTimeoutError(f"no etcd answers: {why}")

    def _exchange(self, what: str, body: str) -> Json:
        if self._connection is None:
            host, port = split_address(self._endpoints[self._current], variable="--rdzv-endpoint")
            self._connection = http.client.HTTPConnection(host, port, timeout=_REQUEST_S)
        self._connection.request("POST", f"/v3/{what}", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        data = response.read()
        if response.status == 503:  # it has no leader at present
            raise OSError(f"HTTP 503 {data[:80]!r}")
        if response.status != 200:
            raise StoreError(
                f"etcd at {self._endpoints[self._current]} refused {what}: HTTP {response.status} {data[:200]!r}"
            )
        try:
            return json.loads(data)
        except ValueError as error:
            raise StoreError(f"what answers at {self._endpoints[self._current]} is no etcd") from error


def _packed(value: StoreValue) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return base64.b64encode(text.encode()).decode()


def _unpacked(value: str) -> Any:
    return json.loads(base64.b64decode(value))


def _text(value: str) -> str:
    return base64.b64decode(value).decode()
