"""Whether a launcher is in good health, over HTTP: for the livenessProbe of Kubernetes, or for curl.

    GET /    200  {"status": "running", "round": 0, "restarts": 0, "workers": {"running": 8, ...}, "progress_s": 1.5, ...}
             503   "status": "failing"      a worker failed or hangs: all are being ended, here and elsewhere
             503   "status": "stuck"        the launcher's own loop has not turned for 15 s: a disk, or who reads its output, stalls

A launcher that waits for other hosts ("meeting", "waiting"), that was told to end ("stopping"), or whose job starts again, is well.
`progress_s`: seconds since any worker here noted what it does; null if none has.
"""

import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from jaxpar_launch._errors import LaunchSpecError
from jaxpar_launch._events import Events
from jaxpar_launch._signals import SignalInbox
from jaxpar_launch._worker import Worker
from jaxpar_launch.flight import FILE_NAME, read_notes

STUCK_S = 15.0
_ASK_S, _CLOSE_S = 5.0, 0.1


class Health:
    """What is said of a launcher.

    Args:
        events: how things stand.
        inbox: the launcher's loop looks into it on each turn.
        workers: of this host, in this round; changes with it.
        stuck_s: how long the loop may stand still.
    """

    def __init__(
        self, events: Events, inbox: SignalInbox, workers: Sequence[Worker], *, stuck_s: float = STUCK_S
    ) -> None:
        self._events, self._inbox, self._workers, self._stuck_s = events, inbox, workers, stuck_s

    def report(self) -> tuple[int, dict[str, Any]]:
        """The HTTP status, and what is told."""
        events, workers = self._events, list(self._workers)
        status, loop_s = events.status, time.monotonic() - self._inbox.looked_at
        if status != "meeting" and loop_s > self._stuck_s:  # to meet is one wait, with a deadline of its own
            status = "stuck"
        codes = [worker.exit_code for worker in workers]
        counts = {"running": codes.count(None), "done": codes.count(0)}
        notes = [read_notes(os.path.join(worker.folder, FILE_NAME), 1) for worker in workers]
        newest = max((some[-1].time_s for some in notes if some), default=None)
        return 503 if status in ("failing", "stuck") else 200, {
            "status": status,
            "round": events.round,
            "restarts": events.restarts,
            "workers": {**counts, "failed": len(codes) - sum(counts.values())},
            "progress_s": None if newest is None else round(max(time.time() - newest, 0.0), 3),
            "loop_s": round(loop_s, 3),
        }


class HealthServer:
    """Answers on all addresses of this host, as whoever probes it needs, until closed.

    Args:
        port: where.
        health: what it tells.

    Raises:
        LaunchSpecError: the port is in use.
    """

    def __init__(self, port: int, health: Health) -> None:
        try:
            self._server = _Server(port, health)
        except OSError as error:
            raise LaunchSpecError(
                f"--health-check-port {port}: {error.strerror or error}. Name another one; each launcher of a host needs its own."
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_CLOSE_S,), name="jaxpar-health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, port: int, health: Health) -> None:
        self.health = health
        super().__init__(("", port), _Answer)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(
            self.server_address
        )  # not HTTPServer's, which asks a name server for this host's name

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has gone."""


class _Answer(http.server.BaseHTTPRequestHandler):
    server_version, sys_version = "jaxpar-launch", ""
    timeout = _ASK_S

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        code, told = self.server.health.report()
        body = json.dumps(told).encode() + b"\n"
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: the console is the workers'."""
