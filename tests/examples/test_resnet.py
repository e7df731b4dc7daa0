"""The ResNet on one device and its data-parallel version: few lines apart, the same result."""

import difflib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import resnet
from jaxpar_launch import launch

EXAMPLES = Path(resnet.__file__).parent
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiling takes most of the time
SINGLE, PARALLEL = EXAMPLES / "resnet_single.py", EXAMPLES / "train_resnet.py"


def changed_lines(before: str, after: str) -> int:
    """Lines to change, add or remove, as `diff` counts them: a line replaced by a line is one change."""
    blocks = difflib.SequenceMatcher(
        None, before.splitlines(), after.splitlines(), autojunk=False
    ).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in blocks if kind != "equal")


@pytest.mark.parametrize(
    ("before", "after", "num"), [("a\nb", "a\nb", 0), ("a\nb", "c\nd\nb", 2), ("a\nb\nc", "a\nd", 2)]
)
def test_changes_are_counted(before: str, after: str, num: int) -> None:
    assert changed_lines(before, after) == num


def test_going_parallel_changes_at_most_ten_lines() -> None:
    assert 0 < changed_lines(SINGLE.read_text(), PARALLEL.read_text()) <= 10
    assert "jaxpar" not in SINGLE.read_text()


def test_both_reach_the_same_accuracy() -> None:
    single, parallel = (epochs(SINGLE, num_devices=1), epochs(PARALLEL, num_devices=2))
    assert len(single) == len(parallel) == 6
    # The same batches, BatchNorm over the whole of each: equal but for rounding, which grows from step to step.
    np.testing.assert_allclose(single[0], parallel[0], atol=5e-3)
    assert single[-1][1] > 0.95 and parallel[-1][1] > 0.95
    assert abs(single[-1][1] - parallel[-1][1]) < 0.015


def epochs(script: Path, *, num_devices: int) -> list[tuple[float, float]]:
    """(loss, test accuracy) of each epoch that the script prints."""
    result = launch(
        script, nproc=1, devices_per_proc=num_devices, timeout_s=300, python=sys.executable, environ=QUICK
    )
    found = re.findall(r"epoch \d: loss (\S+), test accuracy (\S+)%", result.check().output[0])
    return [(float(loss), float(percent) / 100) for loss, percent in found]


def test_batches_cover_the_order_once() -> None:
    batches = resnet.batches(np.arange(11), 3)
    np.testing.assert_array_equal(batches, np.arange(9).reshape(3, 3))
