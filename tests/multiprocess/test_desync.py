"""Processes that do not mean the same training are told so before the first step, in under 5 s (rows W1, W2)."""

import re
from pathlib import Path

import pytest

from jaxpar_launch import launch

WORKER = Path(__file__).parent / "workers" / "desync.py"


@pytest.mark.parametrize(
    ("odd", "fact"),
    [
        ("options", r"options: ranks \[0\]: .*clip_norm=1\.0.*ranks \[1\]: .*clip_norm=2\.0"),
        ("program", r"program: ranks \[0\]"),
        ("shapes", r"arrays: ranks \[0\]: .*\[2, 2\].*ranks \[1\]: .*\[3, 2\]"),
        ("mesh", r"mesh: ranks \[0\]: .*ranks \[1\]: "),
    ],
)
def test_a_difference_is_named_on_every_process(odd: str, fact: str) -> None:
    result = launch([WORKER, odd], nproc=2, timeout_s=90).check()
    for output in result.output:
        seconds = re.search(r"after (\d+\.\d) s: the 2 processes disagree", output)
        assert seconds and float(seconds[1]) < 5, output
        assert re.search(fact, output), output
