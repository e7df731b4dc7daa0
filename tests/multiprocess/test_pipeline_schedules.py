"""Every named schedule, walked by two and by four processes, equals one device: metrics and parameters after a step, 1e-12.

The stages of one placement are compiled once, and each schedule walked over them; fewer microbatches than ranks, and more.
"""

from pathlib import Path

import pytest

from jaxpar.pp import schedule_names
from jaxpar_launch import launch

WORKER = Path(__file__).parent / "workers" / "schedules.py"


@pytest.mark.parametrize(("nproc", "n_microbatches", "stages_per_rank"), [(2, 4, (1, 2)), (4, 2, (1,))])
def test_every_named_schedule_over_processes_equals_one_device(
    nproc: int, n_microbatches: int, stages_per_rank: tuple[int, ...]
) -> None:
    result = launch(
        [WORKER, str(n_microbatches), *map(str, stages_per_rank)], nproc=nproc, timeout_s=240
    ).check()
    ran = [
        {line.split()[1] for line in out.splitlines() if line.startswith("equal:")} for out in result.output
    ]
    names = {name for number in stages_per_rank for name in schedule_names(stages_per_rank=number)}
    assert ran == [names - {"ForwardOnly"}] * nproc
