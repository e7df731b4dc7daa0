"""Full state of a model over two processes: whole on both or on rank 0 only, and back into other layouts."""

import json
import re
from pathlib import Path

import pytest

from jaxpar_launch import launch

WORKER = Path(__file__).parent / "workers" / "full_state.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    command = [WORKER, tmp_path_factory.mktemp("state")]
    result = launch(command, nproc=2, devices_per_proc=2, timeout_s=120).check()
    return [json.loads(re.search(r"^SEEN (.*)$", output, re.MULTILINE)[1]) for output in result.output]  # type: ignore[index]


def test_arrays_over_processes_are_read_whole(seen: list[dict]) -> None:
    for one in seen:
        assert one["is over processes"] == [True, True, True]
        assert one["is whole"] and one["streamed"]


def test_rank_0_only_leaves_nothing_to_the_others(seen: list[dict]) -> None:
    assert [one["rank 0 is whole"] for one in seen] == [True, True]


def test_each_process_loads_its_own_pieces(seen: list[dict]) -> None:
    for one in seen:
        assert one["loaded"] and one["loaded over processes"] and one["moments"]
        assert one["bytes"] == 3 * 8 * 4 // 4 + 16 * 2 // 4 + 4


def test_processes_that_ask_for_different_things_hear_of_it(seen: list[dict]) -> None:
    for one in seen:
        assert "the 2 processes disagree before full_state" in one["desync"]
        assert "budget_bytes=65" in one["desync"]
