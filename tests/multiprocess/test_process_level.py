"""The process level under the launcher, on one process and on two: cases LJ-6 and LJ-8, rows C26, C27, C31, W1."""

import json
import re
from pathlib import Path

import pytest

from jaxpar_launch import launch

WORKER = Path(__file__).parent / "workers" / "process_level.py"


def launched_rows(nproc: int) -> list[dict]:
    """The rows of every rank."""
    result = launch(WORKER, nproc=nproc, timeout_s=120).check()
    return [json.loads(re.search(r"^ROWS (.*)$", output, re.MULTILINE)[1]) for output in result.output]  # type: ignore[index]


@pytest.fixture(scope="module")
def one() -> list[dict]:
    return launched_rows(1)


@pytest.fixture(scope="module")
def many() -> list[dict]:
    return launched_rows(2)


@pytest.fixture(params=["one", "many"])
def ranks(request: pytest.FixtureRequest) -> list[dict]:
    return request.getfixturevalue(request.param)


def test_importing_starts_no_backend_nor_does_init(ranks: list[dict]) -> None:
    assert [(rows["backend after import"], rows["backend after init"]) for rows in ranks] == [
        (False, False)
    ] * len(ranks)


def test_every_process_knows_who_it_is_and_jax_agrees(ranks: list[dict]) -> None:
    n = len(ranks)
    assert [rows["identity"] for rows in ranks] == [[rank, n, rank, True, rank, n] for rank in range(n)]


def test_the_same_init_again_does_nothing_and_another_is_refused(ranks: list[dict]) -> None:
    for rows in ranks:
        assert rows["init again"] is None
        assert "with other arguments: preemption was False, is now True" in rows["init again otherwise"]


def test_objects_reach_every_process(ranks: list[dict]) -> None:
    for rows in ranks:
        assert rows["gather"] == len(ranks) - 1 and rows["broadcast"] == f"from {len(ranks) - 1}"


def test_a_root_that_raises_and_a_value_that_cannot_travel_raise_everywhere(ranks: list[dict]) -> None:
    for rows in ranks:
        assert "ProcessGroupError: broadcast_object: rank 0 raised: ZeroDivisionError" in rows["root raises"]
        assert (
            f"CollectiveError: all_gather_object: rank {len(ranks) - 1} cannot send" in rows["cannot travel"]
        )


def test_process_allgather_has_one_shape_rule(ranks: list[dict]) -> None:
    for rows in ranks:
        assert rows["process_allgather"] == [[rank] * 3 for rank in range(len(ranks))]


def test_a_barrier_lets_all_pass(ranks: list[dict]) -> None:
    assert all(rows["barrier"] is None for rows in ranks)


def test_a_barrier_names_the_missing_rank_in_time(many: list[dict]) -> None:
    assert "ranks [1] of 2 did not come within 0.5 s" in many[0]["barrier without the last"]
    assert many[0]["barrier without the last (s)"] < 4


def test_another_mesh_on_one_process_is_named_in_five_seconds(many: list[dict]) -> None:
    for rows in many:
        assert "DesyncError" in rows["another mesh"]
        assert "mesh: ranks [0]: 'dp=2'; ranks [1]: 'tp=2'" in rows["another mesh"]
        assert "program" not in rows["another mesh"].split("mesh:")[1].split("\n")[0]
        assert rows["another mesh (s)"] < 5


def test_collectives_run_after_warm_up(ranks: list[dict]) -> None:
    for rows in ranks:
        assert rows["warm up"] is None and rows["collective"] == sum(range(1, len(ranks) + 1))


def test_a_whole_array_is_read_alike_on_one_process_and_on_many(ranks: list[dict]) -> None:
    for rows in ranks:
        assert rows["full_array of a sharded array"] == list(range(8))


def test_a_replicated_array_is_read_on_one_rank_without_the_others(ranks: list[dict]) -> None:
    assert ranks[0]["full_array of a replicated array on rank 0"] == list(range(8))


def test_a_global_array_in_process_allgather_is_sent_to_full_array(many: list[dict]) -> None:
    for rows in many:
        assert (
            "spread over several processes. Write jaxpar.mesh.full_array"
            in rows["process_allgather of a global array"]
        )


def test_a_global_batch_joins_the_slices_of_all_processes(ranks: list[dict]) -> None:
    n = len(ranks)
    for rows in ranks:
        assert rows["global batch"] == [[4 * n], sum(6 + 40 * rank for rank in range(n))]


def test_all_leave_together_and_a_second_destroy_does_nothing(ranks: list[dict]) -> None:
    assert all(rows["destroy"] is False for rows in ranks)
