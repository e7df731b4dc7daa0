"""Requests to etcd's HTTP gateway: the first of several servers that answers, with TLS and a user's token where etcd wants them.

no answer, no leader            the next server, until the time is over
a token that is not valid       a new one by /v3/auth/authenticate, once for each request: they expire
a certificate nobody trusts,    an error at once, if all servers say so: waiting does not help
TLS spoken to plain HTTP ...
"""

import copy
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxpar_launch._etcd_access import EtcdAccess
from jaxpar_launch.env import split_address
from jaxpar_launch.store import StoreAuthenticationError, StoreError, StoreTimeoutError

_PAUSE_S, _PROBE_S = 0.05, 2.0
_REQUEST_S, PATIENCE_S = 5.0, 20.0
_ABOUT_US = ("ALERT_CERTIFICATE", "BAD_CERTIFICATE", "ALERT_UNKNOWN_CA", "ALERT_HANDSHAKE_FAILURE")
_STALE = ("invalid auth token", "revision of auth store is old")
Json = dict[str, Any]


class Gateway:
    """One connection at a time to one of several etcd servers.

    Args:
        endpoints: "host:port" of each.
        access: how they are spoken to.
        timeout_s: how long to try with the first request; later ones have 20 s, in which etcd may choose a new leader.
        meanwhile: called between two tries; what it raises ends them.

    Raises:
        LaunchSpecError: there is no password, or a file is no certificate.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        access: EtcdAccess,
        *,
        timeout_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._endpoints, self._access = tuple(endpoints), access
        self._timeout_s, self._meanwhile = timeout_s, meanwhile
        self._tls, self._password = access.tls(), access.password()
        self._token: str | None = None
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._current = 0

    def clone(self) -> "Gateway":
        """Another connection, for another thread."""
        other = copy.copy(self)  # the same files, password and token: none of them is read again
        other._lock, other._connection, other._meanwhile = threading.Lock(), None, lambda: None
        return other

    def close(self) -> None:
        """Ends the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, what: str, message: Json) -> Json:
        """One request, of the first server that answers.

        Raises:
            StoreTimeoutError: none answered in time.
            StoreAuthenticationError: it, or we, are not trusted.
            StoreError: it refused, or is no etcd.
        """
        why = "no time was left to try"
        hopeless: dict[str, str] = {}
        until = time.monotonic() + self._timeout_s
        with self._lock:
            while time.monotonic() < until:
                endpoint = self._endpoints[self._current]
                try:
                    answer = self._ask_with_token(what, message)
                    self._timeout_s = min(self._timeout_s, PATIENCE_S)
                    return answer
                except (OSError, http.client.HTTPException) as error:
                    self.close()
                    why = f"{endpoint}: {error or type(error).__name__}"
                    if (reason := self._why_hopeless(error, endpoint)) is not None:
                        hopeless[endpoint] = reason
                        if len(hopeless) == len(set(self._endpoints)):
                            raise StoreAuthenticationError("; ".join(hopeless.values())) from error
                    self._current = (self._current + 1) % len(self._endpoints)
                    self._meanwhile()
                    time.sleep(_PAUSE_S)
        raise StoreTimeoutError(f"no etcd answers: {why}")

    def _ask_with_token(self, what: str, message: Json) -> Json:
        for is_last in (False, True):
            if self._password is not None and self._token is None:
                login = {"name": self._access.user, "password": self._password}
                self._token = self._exchange("auth/authenticate", login)["token"]
            try:
                return self._exchange(what, message)
            except _StaleTokenError:
                self._token = None
                if is_last:
                    raise
        raise AssertionError

    def _exchange(self, what: str, message: Json) -> Json:
        endpoint = self._endpoints[self._current]
        if self._connection is None:
            self._connection = self._new_connection(endpoint)
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = self._token
        self._connection.request("POST", f"/v3/{what}", json.dumps(message), headers)
        response = self._connection.getresponse()
        data = response.read()
        if response.status == 503:  # it has no leader at present
            raise OSError(f"HTTP 503 {data[:80]!r}")
        if response.status != 200:
            raise self._refusal(f"etcd at {endpoint}", what, response.status, data)
        try:
            return json.loads(data)
        except ValueError as error:
            raise StoreError(f"what answers at {endpoint} is no etcd") from error

    def _new_connection(self, endpoint: str) -> http.client.HTTPConnection:
        host, port = split_address(endpoint, variable="--rdzv-endpoint")
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=_REQUEST_S)
        return http.client.HTTPSConnection(host, port, timeout=_REQUEST_S, context=self._tls)

    # What went wrong, and what to write instead

    def _refusal(self, who: str, what: str, status: int, data: bytes) -> Exception:
        try:
            said = str(json.loads(data)["error"])
        except (ValueError, KeyError, TypeError):
            said = data[:200].decode(errors="replace").strip()
        if any(text in said for text in _STALE):
            return _StaleTokenError(f"{who} takes no token that it gave: {said}")
        if "HTTPS server" in said:
            return http.client.HTTPException(said)  # looked at in `_why_hopeless`
        user = f"user {self._access.user!r}"
        for text, hint in (
            (
                "user name is empty",
                "it wants a user: add --rdzv-conf user=NAME, and set JAXPAR_ETCD_PASSWORD or add password_file=FILE",
            ),
            ("invalid user ID or password", f"{user} or the password is wrong"),
            (
                "permission denied",
                f"{user} may not use these keys: etcdctl role grant-permission ROLE readwrite --prefix=true /jaxpar/",
            ),
            (
                "authentication is not enabled",
                f"{user} is not needed: its authentication is switched off. Leave user=... out, or run etcdctl auth enable",
            ),
        ):
            if text in said:
                return StoreAuthenticationError(f"{who}: {hint} ({said})")
        return StoreError(f"{who} refused {what}: HTTP {status} {said!r}")

    def _why_hopeless(self, error: Exception, endpoint: str) -> str | None:
        """Why it is no use to try again; None if it may be."""
        if self._tls is None:
            is_odd = isinstance(error, ConnectionResetError | http.client.HTTPException)
            if is_odd and _speaks_tls(endpoint):
                return f"etcd at {endpoint} speaks TLS: write --rdzv-conf protocol=https, or --rdzv-endpoint https://{endpoint}"
            return None
        import ssl

        if isinstance(error, ssl.SSLCertVerificationError):
            hint = "Name the file of who signed it: --rdzv-conf cacert=FILE"
            if "mismatch" in error.verify_message:
                hint = "Name etcd in --rdzv-endpoint as its certificate does"
            return f"the certificate of etcd at {endpoint} is not trusted: {error.verify_message.rstrip('.')}. {hint}"
        if isinstance(error, ssl.SSLError) and any(word in (error.reason or "") for word in _ABOUT_US):
            shown = f"not that of {self._access.cert}" if self._access.cert else "and none was shown"
            return (
                f"etcd at {endpoint} wants a certificate of this host that it trusts, {shown}: {error.reason}. Write --rdzv-conf "
                "cert=FILE,key=FILE"
            )
        is_odd = isinstance(error, ConnectionResetError | http.client.HTTPException | ssl.SSLError)
        if is_odd and _speaks_plain_http(endpoint):
            return f"etcd at {endpoint} speaks plain HTTP: leave protocol=https and https:// out"
        return None


class _StaleTokenError(StoreAuthenticationError):
    """The token has expired, or etcd has forgotten it."""


def _speaks_tls(endpoint: str) -> bool:
    """Whether a server shows a certificate there; whose does not matter, for nothing is said to it."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _dial(endpoint) as connection, context.wrap_socket(connection) as secure:
            return secure.getpeercert(binary_form=True) is not None
    except OSError:
        return False


def _speaks_plain_http(endpoint: str) -> bool:
    try:
        with _dial(endpoint) as connection:
            connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
            answer = connection.recv(4096)
    except OSError:
        return False
    return answer.startswith(b"HTTP/") and b"HTTPS" not in answer


def _dial(endpoint: str) -> socket.socket:
    return socket.create_connection(split_address(endpoint, variable="--rdzv-endpoint"), timeout=_PROBE_S)
