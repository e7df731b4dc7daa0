"""Processes that do not mean the same training are told so before the first step, in under 5 s (rows W1, W2)."""

import re
from pathlib import Path

import pytest

from jaxpar_launch import launch

WORKER = Path(__file__).parent / "workers" / "desync.py"


FACTS = {
    "options": r"options: ranks \[0\]: .*clip_norm=1\.0.*ranks \[1\]: .*clip_norm=2\.0",
    "program": r"program: ranks \[0\]",
    "shapes": r"arrays: ranks \[0\]: .*\[2, 2\].*ranks \[1\]: .*\[3, 2\]",
    "mesh": r"mesh: ranks \[0\]: .*ranks \[1\]: ",
}


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    """What each process printed in each case: the processes stay, agree once, and disagree four times."""
    result = launch([WORKER, "nothing", *FACTS], nproc=2, timeout_s=90).check()
    return [
        dict(re.findall(r"^CASE (\w+)\n(.*?)(?=^CASE |\Z)", output, re.M | re.S)) for output in result.output
    ]


def test_processes_that_agree_train(said: list[dict[str, str]]) -> None:
    for output in said:
        assert "no error" in output["nothing"] and "disagree" not in output["nothing"], output["nothing"]


@pytest.mark.parametrize("case", FACTS)
def test_a_difference_is_named_on_every_process(case: str, said: list[dict[str, str]]) -> None:
    for output in said:
        seconds = re.search(r"after (\d+\.\d) s: the 2 processes disagree", output[case])
        assert seconds and float(seconds[1]) < 5, output[case]
        assert re.search(FACTS[case], output[case]), output[case]
