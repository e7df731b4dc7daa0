"""How jobs of several processes end: always in bounded time, with the culprit named; uneven data ends well (DDP-4)."""

import re
import time
from pathlib import Path

from jaxpar_launch import LaunchResult, launch

WORKERS = Path(__file__).parent / "workers"


def run(script: str, argument: str) -> tuple[LaunchResult, float]:
    start = time.monotonic()
    result = launch([WORKERS / script, argument], nproc=2, timeout_s=60)
    return result, time.monotonic() - start


def test_an_exception_on_one_rank_ends_the_job_and_is_blamed() -> None:
    result, _ = run("fail.py", "raises")
    cause = result.failures[0]
    assert result.exit_code == 1 and cause.rank == 1, result.report
    assert cause.message == "ValueError: no data here" and cause.file.endswith("fail.py"), result.report
    assert time.time() - cause.time_s < 5, "the rank that hung in a collective was ended"


def test_sigterm_ends_a_process_as_usual() -> None:
    result, _ = run("fail.py", "SIGTERM")
    assert result.failures[0].rank == 1 and result.failures[0].exit_code == -15, result.report


def test_a_collective_that_one_rank_never_joins_ends_with_an_error() -> None:
    result, duration_s = run("fail.py", "ends")
    assert result.exit_code == 1 and duration_s < 40, result.report
    assert "the end of the script): ranks [0] of 2 did not come within 2" in result.output[1], result.output[
        1
    ]


def test_uneven_batches_train_to_the_mean_over_active_samples() -> None:
    result, _ = run("uneven.py", "joined")
    # Steps: (1 + 3) / 2, (1 + 3) / 2, 1 / 1: divided by the samples that are there, so -5 and not -4.5. Once with
    # iterables that know their length, once with iterators that do not.
    assert [re.search("^W .*", output, re.M)[0] for output in result.check().output] == ["W -5.0 -5.0"] * 2  # type: ignore[index]


def test_uneven_batches_without_join_end_with_an_error() -> None:
    result, duration_s = run("uneven.py", "not joined")
    assert result.exit_code != 0 and duration_s < 40, result.report
    assert "ranks [0] of 2 did not come within 3" in result.output[1], result.output[1]
