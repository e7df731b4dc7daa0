"""Launchers of several hosts, here on loopback: they gather, start together, and end together (rows E1 to E5, E8, W22)."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpar_launch._ports import PortReservation

# Notes its place; then does as the file of its round's number and rank says: waits for it if there is none.
WORKER = """
import json, os, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "JAXPAR_COORDINATOR")
place = {name: os.environ[name] for name in names} | {"pid": os.getpid()}
mine = "places/" + "-".join([place["JAXPAR_COORDINATOR"].rpartition(":")[2], place["RANK"]])
with open(mine + ".new", "w") as file:
    json.dump(place, file)
os.rename(mine + ".new", mine)
while not os.path.exists("go"):
    time.sleep(0.02)
if open("go").read() == "rank " + place["RANK"] + " fails in attempt " + place["TORCHELASTIC_RESTART_COUNT"]:
    raise ValueError("boom")
while not open("go").read().startswith("done") and open("go").read().split()[-1] <= place["TORCHELASTIC_RESTART_COUNT"]:
    time.sleep(0.02)
"""
FAST = "last_call_timeout=0.5,keep_alive_interval=0.3,keep_alive_max_attempt=5,join_timeout=20"


class Hosts:
    """Launchers that meet at one endpoint."""

    def __init__(self, folder: Path, command, script: Path, wait_until) -> None:
        self.folder, self.command, self.script, self.wait_until = folder, command, script, wait_until
        port = PortReservation.draw("127.0.0.1")
        port.close()
        self.endpoint = f"127.0.0.1:{port.port}"
        self.all: list[subprocess.Popen[str]] = []
        (folder / "places").mkdir()

    def start(
        self, *options: object, nnodes: str = "2", conf: str = FAST, nproc: int = 2
    ) -> subprocess.Popen[str]:
        process = self.command.start(
            "--nnodes", nnodes, "--rdzv-endpoint", self.endpoint, "--rdzv-conf", conf, "--nproc-per-node", nproc,
            *options, self.script,
        )  # fmt: skip
        self.all.append(process)
        return process

    def say(self, what: str) -> None:
        (self.folder / "go.new").write_text(what)
        (self.folder / "go.new").rename(self.folder / "go")

    def rounds(self) -> dict[str, list[dict]]:
        """The places of the workers of each round, by coordinator's port, in order of rank."""
        found: dict[str, list[dict]] = {}
        for path in (self.folder / "places").iterdir():
            if not path.name.endswith(".new"):
                found.setdefault(path.name.split("-")[0], []).append(json.loads(path.read_text()))
        return {port: sorted(places, key=lambda p: int(p["RANK"])) for port, places in found.items()}

    def await_round(self, number: int, world_size: int) -> list[dict]:
        """The places of the round of this number, once all its workers are there."""
        seen: list[list[dict]] = []

        def is_there() -> bool:
            full = [r for r in self.rounds().values() if len(r) == int(r[0]["WORLD_SIZE"]) == world_size]
            seen[:] = full
            return len(self.rounds()) >= number + 1 and len(full) > 0 and bool(self._newest(full))

        self.wait_until(is_there, what=f"round {number} with {world_size} workers", timeout_s=20)
        return self._newest(seen)

    def _newest(self, rounds: list[list[dict]]) -> list[dict]:
        alive = [r for r in rounds if all(Path(f"/proc/{p['pid']}").exists() for p in r)]
        return alive[-1] if alive else []

    def end(self) -> list[tuple[int, str]]:
        """Exit code and stderr of each launcher."""
        return [(process.wait(timeout=30), process.communicate()[1]) for process in self.all]


@pytest.fixture
def hosts(tmp_path: Path, command, script: Callable[..., Path], wait_until) -> Hosts:
    return Hosts(tmp_path, command, script(WORKER), wait_until)


def check_places(places: list[dict], *, nproc: int = 2) -> None:
    """Ranks run through the hosts, and all meet at one place."""
    world = len(places)
    assert [int(p["RANK"]) for p in places] == list(range(world))
    assert [int(p["GROUP_RANK"]) for p in places] == [rank // nproc for rank in range(world)]
    assert [int(p["LOCAL_RANK"]) for p in places] == [rank % nproc for rank in range(world)]
    assert {(p["WORLD_SIZE"], p["GROUP_WORLD_SIZE"]) for p in places} == {(str(world), str(world // nproc))}
    assert len({p["JAXPAR_COORDINATOR"] for p in places}) == 1


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_start_and_end_together(hosts: Hosts, num_hosts: int) -> None:
    for _ in range(num_hosts):
        hosts.start(nnodes=str(num_hosts))
    check_places(hosts.await_round(0, 2 * num_hosts))
    hosts.say("done")
    assert [code for code, _ in hosts.end()] == [0] * num_hosts


def test_a_failure_on_one_host_restarts_all_and_all_count_alike(hosts: Hosts) -> None:
    for _ in range(2):
        hosts.start("--max-restarts", 1)
    first = hosts.await_round(0, 4)
    hosts.say("rank 3 fails in attempt 0")
    second = hosts.await_round(1, 4)
    check_places(second)
    assert {p["TORCHELASTIC_RESTART_COUNT"] for p in second} == {"1"}
    assert second[0]["JAXPAR_COORDINATOR"] != first[0]["JAXPAR_COORDINATOR"]
    hosts.say("done")
    ended = hosts.end()
    assert [code for code, _ in ended] == [0, 0]
    for _, stderr in ended:
        assert "failed (exit code 1: ValueError: boom); all workers start again, restart 1 of 1" in stderr


def test_after_the_last_restart_every_host_says_who_failed(hosts: Hosts) -> None:
    for _ in range(2):
        hosts.start()
    hosts.await_round(0, 4)
    hosts.say("rank 3 fails in attempt 0")
    ended = hosts.end()
    assert [code for code, _ in ended] == [1, 1]
    assert sum("rank 3 failed first and ended the job" in stderr for _, stderr in ended) >= 1
    for _, stderr in ended:  # the last lines of the rank that failed, and how all ranks of all hosts ended
        assert "| ValueError: boom" in stderr
        assert [row.split()[0] for row in table_of(stderr)] == ["0", "1", "2", "3"]
        assert table_of(stderr)[3].endswith("exit code 1: ValueError: boom  <- failed first")
        assert all("stopped by the launcher: signal 15 (SIGTERM)" in row for row in table_of(stderr)[:3])


def table_of(stderr: str) -> list[str]:
    """The rows at the end of a report."""
    _, _, rows = stderr.partition("  rank  host")
    return [line for line in rows.splitlines()[1:] if line.split()[:1] and line.split()[0].isdigit()]


def test_a_host_that_comes_late_is_let_in_and_costs_no_restart(hosts: Hosts) -> None:
    hosts.start(nnodes="1:2")
    check_places(hosts.await_round(0, 2))
    hosts.start(nnodes="1:2")
    both = hosts.await_round(1, 4)
    check_places(both)
    assert {p["TORCHELASTIC_RESTART_COUNT"] for p in both} == {"0"}
    hosts.say("done")
    assert [code for code, _ in hosts.end()] == [0, 0]


def test_a_host_that_is_told_to_end_leaves_and_the_others_go_on(hosts: Hosts) -> None:
    hosts.start(nnodes="1:2")
    leaving = hosts.start(nnodes="1:2")
    hosts.await_round(0, 4)
    leaving.send_signal(signal.SIGTERM)
    one = hosts.await_round(1, 2)
    check_places(one)
    assert {p["TORCHELASTIC_RESTART_COUNT"] for p in one} == {"0"}
    hosts.say("done")
    (stayed, told), (left, _) = hosts.end()
    assert (stayed, left) == (0, 143)
    assert "was told to end; all workers start again" in told


def test_with_a_fixed_number_of_hosts_one_that_leaves_ends_the_job(hosts: Hosts) -> None:
    hosts.start("--max-restarts", 3)
    leaving = hosts.start("--max-restarts", 3)
    hosts.await_round(0, 4)
    leaving.send_signal(signal.SIGTERM)
    (stayed, told), (left, _) = hosts.end()
    assert (stayed, left) == (143, 143)
    assert "the job has ended: the launcher on host" in told


def test_hosts_leave_and_come_back_within_the_bounds(hosts: Hosts) -> None:
    for _ in range(4):
        hosts.start(nnodes="2:4", nproc=1)
    check_places(hosts.await_round(0, 4), nproc=1)
    leaving = hosts.all.pop(1 - min(serving(hosts), 1))
    leaving.send_signal(signal.SIGTERM)
    check_places(hosts.await_round(1, 3), nproc=1)
    assert leaving.wait(timeout=10) == 143
    hosts.start(nnodes="2:4", nproc=1)
    again = hosts.await_round(2, 4)
    check_places(again, nproc=1)
    assert {p["TORCHELASTIC_RESTART_COUNT"] for p in again} == {"0"}
    hosts.say("done")
    assert [code for code, _ in hosts.end()] == [0] * 4


EARLY = """
import os, sys, time
host, attempt = os.environ["GROUP_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"ran.{host}.{attempt}", "w").close()
if (host, attempt) == ("1", "0"):
    while not os.path.exists("ran.0.0"):
        time.sleep(0.02)
    time.sleep(0.5)   # the other host's worker has ended well by now
    raise ValueError("boom")
"""


def test_a_host_that_is_done_waits_for_the_others_and_starts_again_with_them(hosts: Hosts, script) -> None:
    hosts.script = script(EARLY, name="early.py")
    for _ in range(2):
        hosts.start("--max-restarts", 1, nproc=1)
    ended = hosts.end()
    assert [code for code, _ in ended] == [0, 0], ended
    assert all("restart 1 of 1" in stderr for _, stderr in ended)
    ran = sorted(path.name for path in hosts.folder.glob("ran.*"))
    assert ran == ["ran.0.0", "ran.0.1", "ran.1.0", "ran.1.1"]


def serving(hosts: Hosts) -> int:
    """Which launcher serves the rendezvous."""
    inodes = {
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
        and int(line.split()[1].split(":")[1], 16) == int(hosts.endpoint.split(":")[1])
    }
    for i, process in enumerate(hosts.all):
        links = {os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir() if link.is_symlink()}
        if {f"socket:[{inode}]" for inode in inodes} & links:
            return i
    raise AssertionError("nobody serves")


def test_a_launcher_that_is_killed_is_missed_and_its_host_can_come_back(hosts: Hosts) -> None:
    for _ in range(2):
        hosts.start("--max-restarts", 2)
    hosts.await_round(0, 4)
    server = serving(hosts)
    hosts.all.pop(1 - server).kill()
    hosts.start("--max-restarts", 2)
    again = hosts.await_round(1, 4)
    check_places(again)
    assert {p["TORCHELASTIC_RESTART_COUNT"] for p in again} == {"1"}
    hosts.say("done")
    ended = hosts.end()
    assert [code for code, _ in ended] == [0, 0]
    assert "is gone: its connection ended; all workers start again, restart 1 of 2" in ended[0][1]


def test_a_launcher_that_is_silent_is_missed(hosts: Hosts) -> None:
    for _ in range(2):
        hosts.start()
    hosts.await_round(0, 4)
    silent = hosts.all.pop(1 - serving(hosts))
    silent.send_signal(signal.SIGSTOP)
    ((code, stderr),) = hosts.end()
    silent.kill()
    assert code == 1
    assert "is gone: no sign of life" in stderr
    rows = table_of(stderr)
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert sum(row.endswith("not known: its launcher is gone") for row in rows) == 2
    assert sum("stopped by the launcher" in row for row in rows) == 2


def test_without_the_host_that_serves_the_rendezvous_the_others_end_and_say_so(hosts: Hosts) -> None:
    for _ in range(2):
        hosts.start("--max-restarts", 2)
    places = hosts.await_round(0, 4)
    hosts.all.pop(serving(hosts)).kill()
    start = time.monotonic()
    ((code, stderr),) = hosts.end()
    assert time.monotonic() - start < 5
    assert code == 1
    assert f"the rendezvous at {hosts.endpoint} is gone" in stderr
    assert ["stopped by the launcher" in row for row in table_of(stderr)] == [True, True]
    hosts.wait_until(
        lambda: not any(Path(f"/proc/{p['pid']}").exists() for p in places), what="the workers' end"
    )


def test_places_given_by_hand_are_kept(hosts: Hosts) -> None:
    host, port = hosts.endpoint.split(":")
    options = ["--nnodes", 2, "--master-addr", host, "--master-port", port, "--rdzv-conf", FAST]
    for node_rank in (1, 0):
        folder = ["--log-dir", hosts.folder / f"logs{node_rank}"]
        hosts.all.append(hosts.command.start(*options, "--node-rank", node_rank, *folder, hosts.script))
    places = hosts.await_round(0, 2)
    hosts.say("done")
    assert [code for code, _ in hosts.end()] == [0, 0]
    assert Counter(p["GROUP_RANK"] for p in places) == {"0": 1, "1": 1}
    for node_rank in (1, 0):
        (run,) = (hosts.folder / f"logs{node_rank}").iterdir()
        assert (run / "attempt_0" / "0" / "stdout.log").exists()


def test_the_same_place_twice_is_refused_on_both(hosts: Hosts) -> None:
    for _ in range(2):
        hosts.start("--node-rank", 1)
    ended = hosts.end()
    assert [code for code, _ in ended] == [2, 2]
    assert any(
        "--node-rank: the 2 nodes say [1, 1]. Each needs its own number from 0 to 1" in e for _, e in ended
    )


def test_who_is_missing_is_said(hosts: Hosts) -> None:
    hosts.start(conf="join_timeout=1")
    ((code, stderr),) = hosts.end()
    assert code == 1
    assert f"1 of 2 nodes came to {hosts.endpoint} within 1 s" in stderr


def test_another_job_at_the_same_endpoint_is_kept_apart(hosts: Hosts) -> None:
    first = hosts.start("--rdzv-id", "a")
    hosts.wait_until(lambda: _listens(hosts.endpoint), what="the first launcher", timeout_s=10)
    hosts.start("--rdzv-id", "b")
    second = hosts.all.pop()
    assert second.wait(timeout=20) == 1
    assert "is another job's" in second.communicate()[1]
    first.send_signal(signal.SIGTERM)
    ((code, stderr),) = hosts.end()
    assert code == 143 and "told to end while waiting" in stderr


def _listens(endpoint: str) -> bool:
    import socket

    host, port = endpoint.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


JAX_WORKER = """
import jax
jax.distributed.initialize()
import jax.numpy as jnp
from jax.experimental import multihost_utils
total = multihost_utils.process_allgather(jnp.asarray(jax.process_index() + 1)).sum()
print("sum", int(total), "of", jax.process_count(), flush=True)
jax.distributed.shutdown()
"""


def test_plain_jax_over_two_hosts(hosts: Hosts, script, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    hosts.script = script(JAX_WORKER, name="plain.py")
    hosts.command.environ |= {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([hosts.command.environ["PYTHONPATH"], *sys.path]),
    }
    for _ in range(2):
        hosts.start(nproc=1)
    outputs = [process.communicate(timeout=60) for process in hosts.all]
    assert [process.returncode for process in hosts.all] == [0, 0], outputs
    assert sum(out.count("sum 3 of 2") for out, _ in outputs) == 2


def test_hosts_that_are_all_told_to_end_end_as_told(hosts: Hosts) -> None:
    """A batch system tells every node at once."""
    for _ in range(3):
        hosts.start("--max-restarts", 3, nnodes="1:3")
    hosts.await_round(0, 6)
    start = time.monotonic()
    for process in hosts.all:
        process.send_signal(signal.SIGTERM)
    ended = hosts.end()
    assert time.monotonic() - start < 15
    assert all(code != 0 for code, _ in ended), ended
    assert sum(code == 143 for code, _ in ended) >= 1
