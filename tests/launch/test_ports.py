"""Two jobs on one host never meet, and a port that is taken is named (case LJ-1)."""

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxpar_launch import LaunchSpec, LaunchSpecError, launch
from jaxpar_launch._ports import PortReservation

# What JAX does with the coordinator's port: rank 0 listens on all interfaces, the others connect.
MEET = """
import os, socket, sys, time
port, rank, job = int(os.environ["MASTER_PORT"]), os.environ["RANK"], sys.argv[1]
if rank == "0":
    server = socket.socket(socket.AF_INET6)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("::", port))
    server.listen()
    peer, _ = server.accept()
    met = peer.recv(100).decode()
    peer.sendall(job.encode())
else:
    while True:
        try:
            peer = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    peer.sendall(job.encode())
    met = peer.recv(100).decode()
assert met == job, f"{job} met {met}"
"""


def test_ten_pairs_of_launches_at_the_same_moment_never_mix(script) -> None:
    path = script(MEET)

    def run(job: int) -> tuple[int, str]:
        result = launch([path, f"job {job}"], nproc=2, timeout_s=50)
        return result.exit_code, result.report

    with ThreadPoolExecutor(2) as pool:
        for pair in range(10):
            assert list(pool.map(run, (2 * pair, 2 * pair + 1))) == [(0, ""), (0, "")]


def test_reserved_ports_are_distinct_and_usable_by_a_worker_only() -> None:
    reservations = [PortReservation.draw("127.0.0.1") for _ in range(50)]
    try:
        assert len({reservation.port for reservation in reservations}) == 50
        with pytest.raises(OSError, match="in use"), socket.socket() as stranger:
            stranger.bind(("127.0.0.1", reservations[0].port))
        socket.create_server(("127.0.0.1", reservations[0].port)).close()  # sets SO_REUSEADDR, as gRPC does
    finally:
        for reservation in reservations:
            reservation.close()


def test_two_launches_cannot_claim_the_same_port() -> None:
    first = PortReservation.draw("127.0.0.1")
    first.close()
    held = PortReservation.claim("127.0.0.1", first.port)
    with pytest.raises(LaunchSpecError, match=f"127.0.0.1:{first.port} is in use"):
        PortReservation.claim("127.0.0.1", first.port)
    held.close()
    PortReservation.claim("127.0.0.1", first.port).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_named_and_nothing_is_started(host: str, command, script, living) -> None:
    path = script("import time; time.sleep(60)")
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        done = command("--nproc-per-node", 2, "--master-port", port, path, timeout_s=30)
    assert done.returncode == 2
    assert f"127.0.0.1:{port} is in use" in done.stderr
    assert not living()


def test_the_same_port_again_right_after_a_killed_job(command, script, wait_until, living) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    path = script(MEET + "print('met', flush=True)\nif job == 'first': time.sleep(60)\n")
    options = ("--nproc-per-node", 2, "--master-port", port, path)
    first = command.start(*options, "first")
    assert "met" in first.stdout.readline()
    first.send_signal(signal.SIGKILL)
    wait_until(lambda: not living(), what="the workers of the killed launcher to end")
    start = time.monotonic()
    assert command(*options, "second").returncode == 0
    assert time.monotonic() - start < 10


def test_the_port_asked_for_reaches_the_workers(script) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    path = script("import os; print(os.environ['MASTER_PORT'], os.environ['JAXPAR_COORDINATOR'])")
    result = launch(LaunchSpec(command=(str(path),), master_port=port), timeout_s=20).check()
    assert result.output == (f"{port} 127.0.0.1:{port}\n",)
