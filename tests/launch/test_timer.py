"""A block that is not left in time is a hang: found without `--hang-timeout`, told as any other, and the job starts again (row E10)."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from jaxpar_launch import flight, launch, timer
from jaxpar_launch._hang import Place, summary, table
from jaxpar_launch._ports import PortReservation
from jaxpar_launch.flight import FlightRecorder, read_limit
from jaxpar_launch.report import report_of

# The last rank does not leave the inner block, in the first attempt.
WORKER = """
import os, time
from jaxpar_launch import heartbeat, timer

def read_batch():
    time.sleep(60)

heartbeat("step 1")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        with timer.expires(after_s=100, scope="epoch"), timer.expires(after_s=0.4, scope="read a batch"):
            read_batch()
    heartbeat("barrier 'epoch'")
    time.sleep(60)
print("well")
"""


def test_a_job_starts_again_when_a_block_is_not_left_in_time(script) -> None:
    start = time.monotonic()
    result = launch(script(WORKER), nproc=2, max_restarts=1, timeout_s=40).check()
    assert [text.count("well") for text in result.output] == [1, 1]
    assert time.monotonic() - start < 20


def test_the_report_names_block_rank_and_place(script, command) -> None:
    result = command("--nproc-per-node", 3, "--log-dir", "logs", script(WORKER))
    assert result.returncode == 124
    told = "no progress: rank 2 did not leave 'read a batch' within 0.4 s; ranks 0, 1 in barrier 'epoch'"
    assert f"jaxpar-launch: {told}" in result.stderr
    rows = [line for line in result.stderr.splitlines() if "<- not out of" in line]
    assert len(rows) == 1 and rows[0].split()[0] == "2"
    assert "worker.py:6 in read_batch  <- not out of 'read a batch' within 0.4 s" in rows[0]
    (run,) = (command.folder / "logs").iterdir()
    assert told in (run / "attempt_0" / "hang.txt").read_text()
    after = report_of(str(run / "attempt_0"), 0, 0)
    assert "step 1; in 'read a batch' within 0.4 s" in after


def test_hosts_tell_each_other(script, command) -> None:
    port = PortReservation.draw("127.0.0.1")
    port.close()
    line = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port.port}", "--nproc-per-node", 1]
    launchers = [command.start(*line, script(WORKER)) for _ in range(2)]
    stderrs = [launcher.communicate(timeout=40)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [124, 124], stderrs
    for stderr in stderrs:
        assert "rank 1 did not leave 'read a batch' within 0.4 s; rank 0 in barrier 'epoch'" in stderr
        assert "worker.py:6 in read_batch" in stderr


def test_a_block_stuck_in_c_is_found(script) -> None:
    stuck = """
    import ctypes
    from jaxpar_launch.timer import expires
    with expires(after_s=0.3):
        ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock
    """
    result = launch(script(stuck), timeout_s=30)
    assert result.exit_code == 124
    assert "no progress: rank 0 did not leave worker.py:4 within 0.3 s" in result.report
    assert "worker.py:5 in <module>" in result.report


def test_blocks_that_are_left_in_time_change_nothing(script) -> None:
    busy = """
    import time
    from jaxpar_launch import timer

    @timer.expires(after_s=0.6, scope="step")
    def step():
        time.sleep(0.3)

    for _ in range(4):
        step()
    try:
        with timer.expires(after_s=0.3):
            raise KeyError
    except KeyError:
        time.sleep(0.8)
    """
    launch(script(busy), nproc=2, timeout_s=30).check()


def test_a_limit_and_the_hang_timeout_work_side_by_side(script) -> None:
    silent = """
    import time
    from jaxpar_launch import heartbeat, timer
    heartbeat("step 1")
    with timer.expires(after_s=60, scope="epoch"):
        time.sleep(60)
    """
    result = launch(script(silent), hang_timeout_s=0.4, timeout_s=30)
    assert result.exit_code == 124 and "no progress: rank 0 in step 1" in result.report


def test_of_nested_blocks_that_counts_which_ends_first(tmp_path: Path) -> None:
    path = str(tmp_path / "flight.bin")
    recorder = FlightRecorder(path)

    def scope() -> str | None:
        limit = read_limit(path)
        return limit and limit.scope

    assert scope() is None
    outer = recorder.begin(10, "outer")
    long = recorder.begin(20, "longer than the outer one")
    assert scope() == "outer"
    short = recorder.begin(5, "short" + "x" * 1000)
    assert (scope() or "").startswith("shortx")
    recorder.note("notes are apart")
    recorder.end(outer)  # of another thread: blocks need not end in the order of a stack
    assert (scope() or "").startswith("shortx")
    recorder.end(short)
    assert scope() == "longer than the outer one"
    recorder.end(long)
    assert scope() is None


def test_whoever_looks_while_a_limit_is_written_sees_none(tmp_path: Path, monkeypatch) -> None:
    path, layout, seen = str(tmp_path / "flight.bin"), flight._LIMIT, []

    class Watched:
        """Someone looks when half is written."""

        unpack_from = layout.unpack_from

        def pack_into(self, *arguments: Any) -> None:
            layout.pack_into(*arguments)
            seen.append(read_limit(path))

    recorder = FlightRecorder(path)
    monkeypatch.setattr(flight, "_LIMIT", Watched())
    limit = recorder.begin(10, "step")
    assert read_limit(path) == limit
    recorder.end(limit)
    assert seen == [None, None] and read_limit(path) is None


def test_a_block_is_cheap(tmp_path: Path) -> None:
    recorder = FlightRecorder(str(tmp_path / "f"))
    before = os.times().system
    for _ in range(10_000):
        recorder.end(recorder.begin(30, "step"))
    assert os.times().system - before < 0.5  # no system call for each


@pytest.mark.parametrize("after_s", [0, -1, float("inf"), float("nan")])
def test_what_is_no_time_is_refused(after_s: float) -> None:
    with pytest.raises(ValueError, match=r"must be a number of seconds above 0, as in expires\(after_s=30\)"):
        timer.expires(after_s)


def place(rank: int, doing: str, late: str = "") -> Place:
    return Place(rank=rank, host="a", pid=1, silent_s=1, doing=doing, where="", late=late)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([place(0, "", "'x' within 1 s")], "no progress: rank 0 did not leave 'x' within 1 s"),
        ([place(0, "s", "x"), place(1, "t", "x")], "no progress: ranks 0, 1 did not leave x"),
        (
            [place(0, "s", "x"), place(1, "t", "y"), place(2, "s"), place(3, "")],
            "no progress: rank 0 did not leave x; rank 1 did not leave y; rank 2 in s",
        ),
    ],
)
def test_who_is_late_is_said_first(places: list[Place], expected: str) -> None:
    assert summary(places) == expected
    assert ("<- not out of" in table(places)) == any(place.late for place in places)
