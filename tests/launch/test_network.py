"""Two hosts as network namespaces: other addresses, other host names, no common loopback (where this machine allows them)."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BRIDGE = f"jxb{os.getpid() % 100000}"
NAMES = [f"jxn{os.getpid() % 100000}{i}" for i in range(2)]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=10)


def _made(version: str) -> bool:
    """Two namespaces on one bridge."""
    addresses = {"4": "10.231.77.{}/24", "6": "fd00:77::{}/64"}[version]
    steps = [f"ip link add {BRIDGE} type bridge", f"ip link set {BRIDGE} up"]
    for i, name in enumerate(NAMES):
        inside = f"ip -n {name}"
        steps += [
            f"ip netns add {name}",
            f"ip link add {name} type veth peer name eth0 netns {name}",
            f"ip link set {name} master {BRIDGE} up",
            f"{inside} addr add {addresses.format(i + 1)} dev eth0" + (" nodad" if version == "6" else ""),
            f"{inside} link set eth0 up",
            f"{inside} link set lo up",
        ]
    return all(run(*shlex.split(step)).returncode == 0 for step in steps)


@pytest.fixture(params=["4", "6"])
def hosts(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The addresses of two hosts."""
    if os.name != "posix" or not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    try:
        if not _made(request.param):
            pytest.skip("this machine does not let us make network namespaces")
        yield {"4": ["10.231.77.1", "10.231.77.2"], "6": ["fd00:77::1", "fd00:77::2"]}[request.param]
    finally:
        for name in NAMES:
            run("ip", "netns", "del", name)
        run("ip", "link", "del", BRIDGE)


def on_host(i: int, addresses: list[str], command, *arguments: object) -> subprocess.Popen[str]:
    """A launcher on one of them, under a host name of its own that leads to its address (Gloo asks for it)."""
    hosts = command.folder / "hosts"
    hosts.write_text("".join(f"{address} node{n}\n" for n, address in enumerate(addresses)))
    line = [sys.executable, "-S", "-m", "jaxpar_launch", *map(str, arguments)]
    named = f"mount --bind {hosts} /etc/hosts && hostname node{i} && exec {shlex.join(line)}"
    process = subprocess.Popen(
        ["ip", "netns", "exec", NAMES[i], "unshare", "--uts", "--mount", "sh", "-c", named],
        cwd=command.folder,
        env=command.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    command._started.append(process)
    return process


WORKER = """
import jax, os, socket
import jaxpar
jaxpar.init_process_group(timeout_s=30)
mesh = jaxpar.init_device_mesh((2,), ("dp",))
print(socket.gethostname(), "rank", jaxpar.mesh.get_rank(), "of", jaxpar.mesh.get_world_size(), os.environ["MASTER_ADDR"], flush=True)
print("gathered", jaxpar.mesh.all_gather_object(socket.gethostname()), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and jaxpar.mesh.get_rank() == 1:
    os.kill(os.getpid(), 9)
jaxpar.mesh.barrier("all are here")
"""


def test_two_hosts_join_and_restart(hosts: list[str], command, script) -> None:
    command.environ |= {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(
            [command.environ["PYTHONPATH"], str(Path(__file__).parents[2]), *sys.path]
        ),
    }
    endpoint = f"[{hosts[0]}]:29400" if ":" in hosts[0] else f"{hosts[0]}:29400"
    path = script(WORKER)
    launchers = [
        on_host(i, hosts, command, "--nnodes", 2, "--rdzv-endpoint", endpoint, "--max-restarts", 1, path)
        for i in (1, 0)
    ]
    (out1, err1), (out0, err0) = (launcher.communicate(timeout=60) for launcher in launchers)
    assert [launcher.returncode for launcher in launchers] == [0, 0], f"{err0}\n{err1}"
    seen = out0 + out1
    for node in range(2):
        assert seen.count(f"node{node} rank") == 2  # once in each attempt
    assert {a for a in hosts if f" of 2 {a}\n" in seen}  # workers met at an address that both can reach
    assert seen.count("gathered ['node0', 'node1']") + seen.count("gathered ['node1', 'node0']") >= 3
    for err in (err0, err1):
        assert "signal 9 (SIGKILL)); all workers start again, restart 1 of 1" in err
