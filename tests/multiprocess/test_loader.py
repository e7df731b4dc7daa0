"""Global batches of two processes are those of one, on meshes of any order of processes; the state moves between them."""

import json
import re
from pathlib import Path

import pytest

from jaxpar.data import DistributedSampler
from jaxpar_launch import launch

WORKER = Path(__file__).parent / "workers" / "loader.py"
LENGTH, SIZE = 22, 8
ORDER = list(DistributedSampler(LENGTH, num_replicas=1, rank=0, seed=1))
MESHES = (
    "dp",
    "dp, the last process first",
    "dp, processes in turn",
    "dp, tp over processes",
    "tp, dp",
    "grain",
)


def launched(nproc: int, devices: int, state: dict | None) -> list[dict]:
    """The rows of every rank."""
    command = [WORKER, json.dumps(state)]
    result = launch(command, nproc=nproc, devices_per_proc=devices, timeout_s=120).check()
    return [json.loads(re.search(r"^ROWS (.*)$", output, re.MULTILINE)[1]) for output in result.output]  # type: ignore[index]


def expected(first: int) -> list[list]:
    """Rows and mask of every batch from that sample on; rows that fill up repeat the last sample."""
    parts = [ORDER[i : i + SIZE] for i in range(first, LENGTH, SIZE)]
    return [
        [part + part[-1:] * (SIZE - len(part)), [True] * len(part) + [False] * (SIZE - len(part))]
        for part in parts
    ]


@pytest.fixture(scope="module")
def two() -> list[dict]:
    return launched(2, 2, None)


@pytest.mark.parametrize("mesh", [*MESHES, "sampler"])
def test_the_global_batches_of_two_processes_are_those_of_one(mesh: str, two: list[dict]) -> None:
    for rows in two:
        assert rows[mesh]["batches"] == expected(0)


def test_each_process_feeds_the_rows_of_its_devices(two: list[dict]) -> None:
    batch = expected(0)[0][0]
    fed = {mesh: [rows[mesh]["fed"][0] for rows in two] for mesh in MESHES}
    assert fed["dp"] == fed["grain"] == [batch[:4], batch[4:]]
    assert fed["dp, the last process first"] == [batch[4:], batch[:4]]
    assert fed["dp, processes in turn"] == [batch[0:2] + batch[4:6], batch[2:4] + batch[6:8]]
    assert fed["tp, dp"] == fed["dp, tp over processes"] == [batch, batch]


def test_processes_that_would_read_different_orders_are_told_apart(two: list[dict]) -> None:
    for rows in two:
        assert "disagree before a pass of DataLoader" in rows["desync"]
        assert re.search(r"state: ranks \[0\]: .*'seed': 0.*; ranks \[1\]: .*'seed': 1", rows["desync"])


def test_the_state_is_the_same_everywhere_and_one_process_goes_on_from_it(two: list[dict]) -> None:
    states = [rows[mesh]["state"] for rows in two for mesh in MESHES]
    assert all(state == states[0] for state in states) and states[0]["offset"] == 2 * SIZE
    state = states[0] | {"offset": SIZE}
    (alone,) = launched(1, 2, state)
    for mesh in (*MESHES, "sampler"):
        assert alone[mesh]["batches"] == expected(SIZE)
