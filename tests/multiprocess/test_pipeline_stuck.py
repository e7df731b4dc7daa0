"""Nobody waits for ever: a rank whose neighbour does not send names stage, microbatch, peer and what it expected."""

import re
from pathlib import Path

import pytest

from jaxpar_launch import launch

WORKER = Path(__file__).parent / "workers" / "pipeline_stuck.py"


WAITED_FOR = {
    "pull": r"rank 0 of the pipeline \(process 0\) expects \['float32\[1, 2, 4\]'\] from rank 1 \(processes \[1\]\)",
    "permute": r"from rank 1 of the pipeline \(processes \[1\]\) to rank 0 \(processes \[0\]\), and this is process 0",
}


@pytest.mark.parametrize(("how", "transport"), [("sleeps", "permute"), ("other_shape", "pull")])
def test_a_rank_whose_neighbour_does_not_send_says_for_what_it_waits(how: str, transport: str) -> None:
    result = launch([WORKER, how, transport], nproc=2, devices_per_proc=1, timeout_s=60)
    assert result.exit_code != 0
    assert re.search(
        r"ProcessGroupError: pipeline: gradients of microbatch 0, from stage 1 to stage 0, did not come within 8 s: "
        + WAITED_FOR[transport],
        result.output[0],
    ), result.output[0]
