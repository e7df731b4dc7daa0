"""With etcd the meeting outlives any host of the job: also the first one may die (real etcd, where it is installed)."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpar_launch._etcd import EtcdClient
from jaxpar_launch.store import StoreTimeoutError

FAST = "last_call_timeout=0.5,keep_alive_interval=0.3,keep_alive_max_attempt=5,join_timeout=20"
WORKER = """
import os, time
print("up", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def etcd(start_etcd: Callable[..., str]) -> str:
    """The address of an etcd."""
    address = start_etcd()
    EtcdClient([address], prefix="/test/", timeout_s=20).close()
    return address


def test_it_has_the_operations_of_a_store(etcd: str) -> None:
    with EtcdClient([etcd], prefix="/a/", timeout_s=5) as client, client.clone() as other:
        client.set("x", {"b": [1, "z"], "a": None})
        assert other.try_get("x") == {"b": [1, "z"], "a": None}
        assert other.try_get("y") is None
        assert client.compare_set("y", None, 1) == 1
        assert client.compare_set("y", None, 2) == 1
        assert client.compare_set("y", 1, 3) == 3
        assert client.compare_set("z", 1, 3) is None
        assert client.keys() == ["x", "y"] and client.get("y", timeout_s=1) == 3
        with pytest.raises(StoreTimeoutError, match="1 of 2 keys were not set in etcd within 0.2 s: z"):
            client.wait(["x", "z"], timeout_s=0.2)
        assert client.delete_prefix("") == 2 and client.keys() == []


def test_of_several_the_one_that_answers_is_asked(etcd: str, unused_port: int) -> None:
    with EtcdClient([f"127.0.0.1:{unused_port}", etcd], prefix="/b/", timeout_s=5) as client:
        client.set("x", 1)
        assert client.get("x") == 1


def test_no_etcd_is_an_error_in_time(unused_port: int) -> None:
    start = time.monotonic()
    with pytest.raises(StoreTimeoutError, match="no etcd answers: 127.0.0.1"):
        EtcdClient([f"127.0.0.1:{unused_port}"], prefix="/", timeout_s=0.5)
    assert time.monotonic() - start < 5


def test_the_first_host_may_die_and_the_others_go_on(etcd: str, script, command, wait_until) -> None:
    path = script(WORKER)
    options = ["--nnodes", "1:2", "--rdzv-backend", "etcd", "--rdzv-endpoint", etcd, "--rdzv-conf", FAST]
    options += ["--max-restarts", 1, "--rdzv-id", "job", "--log-dir"]
    first = command.start(*options, "logs0", path)
    time.sleep(0.2)
    second = command.start(*options, "logs1", path)
    logs = [command.folder / f"logs{i}" for i in range(2)]

    def said(i: int) -> list[str]:
        return [file.read_text() for file in sorted(Path(logs[i]).glob("*/attempt_*/0/stdout.log"))]

    wait_until(lambda: any("of 2" in text for text in said(1)), what="both hosts", timeout_s=20)
    first.kill()
    wait_until(lambda: "up 0 of 1 1\n" in said(1), what="the second host alone", timeout_s=20)
    (command.folder / "go").touch()
    _, stderr = second.communicate(timeout=20)
    assert second.returncode == 0, stderr
    assert "is gone: no sign of life; all workers start again, restart 1 of 1" in stderr
    with EtcdClient([etcd], prefix="/jaxpar/job/", timeout_s=5) as client:
        assert client.keys() == []  # nothing is left of the job
