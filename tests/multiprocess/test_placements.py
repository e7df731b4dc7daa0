"""Placed arrays whose devices belong to two processes: each sees its own pieces, and all see one value (case LJ-8)."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxpar_launch import launch

WORKER = Path(__file__).parent / "workers" / "placements.py"
VALUE = np.arange(10.0).reshape(5, 2)


@pytest.fixture(scope="module")
def seen() -> list[dict]:
    result = launch(WORKER, nproc=2, devices_per_proc=2, timeout_s=120).check()
    return [json.loads(re.search(r"^SEEN (.*)$", output, re.MULTILINE)[1]) for output in result.output]  # type: ignore[index]


def test_the_last_axis_lies_inside_a_process(seen: list[dict]) -> None:
    assert seen[0]["mesh"] == "DeviceMesh((dp=2, tp=2), 'cpu', devices=4, processes=2)"
    assert [one["coordinates"] for one in seen] == [[[0, 0], [0, 1]], [[1, 0], [1, 1]]]


def test_each_process_sees_its_own_pieces(seen: list[dict]) -> None:
    assert [one["padded"] for one in seen] == [
        [VALUE[:3, :1].tolist(), VALUE[:3, 1:].tolist()],
        [VALUE[3:, :1].tolist(), VALUE[3:, 1:].tolist()],
    ]
    assert [one["moved"] for one in seen] == [[VALUE[:3].tolist(), VALUE[3:].tolist()]] * 2
    assert [one["terms"] for one in seen] == [[1.0, 2.0], [3.0, 4.0]]


def test_all_processes_see_one_value(seen: list[dict]) -> None:
    for one in seen:
        assert one["moved whole"] == VALUE.tolist()
        assert one["sum"] == 10.0
        assert one["max"] == VALUE.tolist()
        assert one["placements"] == ["P(sum)", "P(sum)"]
        assert one["normal"] is True
