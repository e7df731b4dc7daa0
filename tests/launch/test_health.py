"""The health check of a launcher: 200 while it is well, whatever it waits for; 503 when it is stuck or its job is failing (row E10)."""

import json
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from jaxpar_launch import LaunchSpec, LaunchSpecError, launch
from jaxpar_launch._events import Events
from jaxpar_launch._health import Health, HealthServer
from jaxpar_launch._ports import PortReservation
from jaxpar_launch._signals import SignalInbox
from jaxpar_launch.cli import main

WORKER = """
import os, sys, time
from jaxpar_launch import heartbeat
heartbeat("step 1")
while not os.path.exists("go"):
    time.sleep(0.02)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
"""
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    open("up", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.02)
    sys.exit(3)
time.sleep(60)
"""


def ask(port: int, *, host: str = "127.0.0.1", method: str = "GET") -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"http://{host}:{port}/", method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, json.loads(answer.read() or "{}")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or "{}")
    except OSError:  # not there yet, or no more
        return 0, {"status": "none"}


@pytest.fixture
def comes_to(
    unused_port: int, wait_until: Callable[..., None]
) -> Callable[[str], tuple[int, dict[str, Any]]]:
    """`comes_to(status)` waits until that is what the port says, and gives all of it."""

    def wait(status: str) -> tuple[int, dict[str, Any]]:
        last: list[tuple[int, dict[str, Any]]] = []

        def is_it() -> bool:
            last[:] = [ask(unused_port)]
            return last[0][1]["status"] == status

        wait_until(is_it, what=status, timeout_s=20)
        return last[0]

    return wait


def test_a_running_job_is_well_and_tells_of_its_restart(script, command, comes_to, unused_port) -> None:
    line = ["--nproc-per-node", 2, "--max-restarts", 1, "--health-check-port", unused_port]
    process = command.start(*line, script(WORKER))
    until = time.monotonic() + 20
    while (said := comes_to("running"))[1]["progress_s"] is None and time.monotonic() < until:
        time.sleep(0.02)
    code, told = said
    assert code == 200
    assert told["workers"] == {"running": 2, "done": 0, "failed": 0}
    assert (told["round"], told["restarts"]) == (0, 0)
    assert 0 <= told["progress_s"] < 20 and 0 <= told["loop_s"] < 5
    assert ask(unused_port, method="HEAD") == (200, {})
    if socket.has_dualstack_ipv6():
        assert ask(unused_port, host="[::1]")[0] == 200
    (command.folder / "go").touch()
    stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout) == (0, ""), stderr
    assert "restart 1 of 1" in stderr  # and nothing of those who asked
    assert ask(unused_port) == (0, {"status": "none"})


def test_a_failing_job_is_not_well(script, command, comes_to, unused_port, wait_until) -> None:
    command.environ["JAXPAR_HEALTH_CHECK_PORT"] = str(unused_port)
    process = command.start("--nproc-per-node", 2, "--failure-grace-period", 3, script(STUBBORN))
    wait_until(lambda: (command.folder / "up").exists(), what="the workers", timeout_s=20)
    assert comes_to("running")[0] == 200
    (command.folder / "go").touch()
    code, told = comes_to("failing")
    assert code == 503 and told["workers"] == {"running": 1, "done": 0, "failed": 1}
    process.communicate(timeout=20)
    assert process.returncode == 3


def test_who_was_told_to_end_is_well_until_it_has(script, command, comes_to, unused_port) -> None:
    line = ["--nproc-per-node", 2, "--grace-period", 2, "--health-check-port", unused_port]
    process = command.start(*line, script(STUBBORN))
    comes_to("running")
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert comes_to("stopping")[0] == 200
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_who_waits_for_other_hosts_is_well_and_can_be_told_to_end(
    script, command, comes_to, unused_port
) -> None:
    port = PortReservation.draw("127.0.0.1")
    port.close()
    endpoint = f"127.0.0.1:{port.port}"
    for place, status in ((endpoint, "waiting"), ("192.0.2.1:29400", "meeting")):  # here; nobody's (RFC 5737)
        line = ["--nnodes", 2, "--rdzv-endpoint", place, "--health-check-port", unused_port]
        process = command.start(*line, script(WORKER))
        code, told = comes_to(status)
        assert code == 200 and told["workers"] == {"running": 0, "done": 0, "failed": 0}
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=10)
        assert process.returncode == 143 and "told to end while waiting" in stderr


def test_a_launcher_whose_loop_stands_still_is_stuck(unused_port: int, wait_until) -> None:
    events = Events(None, "a")
    with SignalInbox() as inbox:
        server = HealthServer(unused_port, Health(events, inbox, [], stuck_s=0.3))
        try:
            time.sleep(0.4)
            assert ask(unused_port)[0] == 200  # one long wait for the first host
            events.note("gathering")
            wait_until(lambda: ask(unused_port)[1]["status"] == "stuck", what="stuck")
            assert ask(unused_port)[0] == 503
            inbox.take()
            assert ask(unused_port) == (
                200,
                ask(unused_port)[1] | {"loop_s": pytest.approx(0, abs=10)},
            )  # below 15 s: not stuck
        finally:
            server.close()
    assert ask(unused_port)[0] == 0


def test_one_that_asks_and_says_nothing_keeps_nobody_out(unused_port: int) -> None:
    with SignalInbox() as inbox:
        server = HealthServer(unused_port, Health(Events(None, "a"), inbox, []))
        try:
            with (
                socket.create_connection(("127.0.0.1", unused_port)),
                socket.create_connection(("127.0.0.1", unused_port)),
            ):
                assert ask(unused_port)[0] == 200
        finally:
            server.close()


def test_a_port_that_is_taken_is_an_error_before_anything_starts(script, unused_port: int, capsys) -> None:
    with socket.create_server(("", unused_port)):
        assert main(["--health-check-port", str(unused_port), str(script("open('started', 'w')"))]) == 2
    told = capsys.readouterr().err
    assert f"--health-check-port {unused_port}: Address already in use. Name another one" in told
    with pytest.raises(LaunchSpecError, match=r"--health-check-port 0 does not lie in 1\.\.65535"):
        LaunchSpec(health_check_port=0)


def test_it_is_there_for_launches_from_python_too(unused_port: int) -> None:
    spec = LaunchSpec(health_check_port=unused_port)
    assert launch(spec, ask, args=(unused_port,), timeout_s=20).values[0][0] == 200
