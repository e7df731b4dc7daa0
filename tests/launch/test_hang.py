"""A job that makes no progress is found: who waits where, who is missing, and then it starts again (rows G3, G4)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar_launch import launch
from jaxpar_launch._hang import Place, summary, table
from jaxpar_launch.flight import FlightRecorder, count_notes, read_notes

# Rank 1 does not come to where the others wait, in the first attempt.
WORKER = """
import os, time
from jaxpar_launch import heartbeat

def read_data():
    time.sleep(60)

heartbeat("step 1")
heartbeat("step 2")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        read_data()
    heartbeat("barrier 'epoch'")
    while True:
        time.sleep(0.01)
print("well")
"""


def test_who_is_missing_is_said_and_the_job_starts_again(script) -> None:
    result = launch(script(WORKER), nproc=3, hang_timeout_s=0.7, max_restarts=1, timeout_s=40).check()
    assert [text.count("well") for text in result.output] == [1, 1, 1]


def test_the_report_of_a_hang_names_places(script, command) -> None:
    result = command("--nproc-per-node", 3, "--hang-timeout", 0.7, "--log-dir", "logs", script(WORKER))
    assert result.returncode == 124
    told = "jaxpar-launch: no progress: ranks 0, 2 wait in barrier 'epoch'; missing: rank 1 in step 2"
    assert told in result.stderr
    lines = result.stderr.splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith("  ") and line.split()[0].isdigit()}
    assert sorted(rows) == ["0", "1", "2"]
    assert rows["1"].endswith("worker.py:6 in read_data")
    assert rows["0"].endswith("worker.py:15 in <module>")
    (run,) = (command.folder / "logs").iterdir()
    assert told in (run / "attempt_0" / "hang.txt").read_text()
    after = subprocess.run(
        [sys.executable, "-m", "jaxpar_launch.report", "logs", "--notes", "9"],
        cwd=command.folder, env=command.environ, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert after.returncode == 0, after.stderr
    assert "missing: rank 1 in step 2" in after.stdout
    assert "worker.py:6 in read_data" in after.stdout
    assert "s  step 1" in after.stdout and "s  step 2" in after.stdout
    assert f"the launcher ended: exit code 124: {told}" in after.stdout


def test_a_worker_stuck_in_c_says_where(script) -> None:
    stuck = """
    import ctypes, jaxpar_launch
    jaxpar_launch.heartbeat("step 1")
    libc = ctypes.PyDLL(None)  # a call that keeps the interpreter's lock
    libc.sleep(60)
    """
    result = launch(script(stuck), nproc=1, hang_timeout_s=0.5, timeout_s=30)
    assert result.exit_code == 124
    assert "worker.py:5 in <module>" in result.report


def test_who_never_notes_anything_is_never_taken_for_hung(script) -> None:
    launch(script("import time; time.sleep(1.5)"), nproc=2, hang_timeout_s=0.3, timeout_s=30).check()


def test_progress_keeps_a_job_alive(script) -> None:
    busy = """
    import time
    from jaxpar_launch import heartbeat
    for step in range(20):
        heartbeat(f"step {step}")
        time.sleep(0.1)
    """
    launch(script(busy), nproc=2, hang_timeout_s=1, timeout_s=30).check()


def test_hosts_tell_each_other_where_their_ranks_are(script, command) -> None:
    from jaxpar_launch._ports import PortReservation

    port = PortReservation.draw("127.0.0.1")
    port.close()
    options = [
        "--nnodes",
        2,
        "--rdzv-endpoint",
        f"127.0.0.1:{port.port}",
        "--nproc-per-node",
        2,
        "--hang-timeout",
        1,
    ]
    launchers = [command.start(*options, script(WORKER)) for _ in range(2)]
    stderrs = [launcher.communicate(timeout=40)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [124, 124], stderrs
    for stderr in stderrs:
        assert "ranks 0, 2, 3 wait in barrier 'epoch'; missing: rank 1 in step 2" in stderr
        rows = [
            line.split()[0]
            for line in stderr.splitlines()
            if line.startswith("  ") and line.split()[0].isdigit()
        ]
        assert rows == ["0", "1", "2", "3"]


def test_the_recorder_keeps_the_last_notes_of_a_process_that_was_killed(tmp_path: Path) -> None:
    path = str(tmp_path / "flight.bin")
    code = f"""
import os
from jaxpar_launch.flight import FlightRecorder
recorder = FlightRecorder({path!r})
for i in range(1000):
    recorder.note(f"note {{i}} " + "x" * (i % 400))
os.kill(os.getpid(), {int(signal.SIGKILL)})
"""
    subprocess.run([sys.executable, "-c", code], timeout=20, check=False)
    assert count_notes(path) == 1000
    notes = read_notes(path)
    assert len(notes) == 256
    assert [note.text.split()[1] for note in notes] == [str(i) for i in range(744, 1000)]
    assert all(len(note.text) <= 256 for note in notes)
    assert [note.time_s for note in notes] == sorted(note.time_s for note in notes)


def test_files_that_are_no_recorders_hold_no_notes(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x")
    for name in ("short", "missing"):
        assert read_notes(str(tmp_path / name)) == () and count_notes(str(tmp_path / name)) == 0


def test_a_note_is_cheap(tmp_path: Path) -> None:
    recorder = FlightRecorder(str(tmp_path / "f"))
    before = os.times().system
    for i in range(10_000):
        recorder.note(f"step {i}")
    assert os.times().system - before < 0.5  # no system call for each
    assert count_notes(str(tmp_path / "f")) == 10_000


def place(rank: int, doing: str, silent_s: float = 9.0) -> Place:
    return Place(rank=rank, host="a", pid=100 + rank, silent_s=silent_s, doing=doing, where="")


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], "no worker makes progress"),
        ([place(0, "x"), place(1, "x")], "no progress: ranks 0, 1 in x"),
        (
            [place(0, "x"), place(1, "y"), place(2, "x")],
            "no progress: ranks 0, 2 wait in x; missing: rank 1 in y",
        ),
        ([place(0, "x", 5), place(1, "y", 9)], "no progress: rank 0 waits in x; missing: rank 1 in y"),
        (
            [place(0, ""), place(1, "y"), place(2, "y")],
            "no progress: ranks 1, 2 wait in y; missing: rank 0 in no note",
        ),
    ],
)
def test_the_larger_group_waits_and_of_equal_ones_the_later(places: list[Place], expected: str) -> None:
    assert summary(places) == expected


def test_the_table_is_in_order_of_ranks() -> None:
    text = table([place(10, "a"), place(2, "b")])
    assert [line.split()[0] for line in text.splitlines()] == ["rank", "2", "10"]


def test_the_report_of_no_run_says_so(tmp_path: Path, capsys) -> None:
    from jaxpar_launch.report import main

    assert main([str(tmp_path)]) == 2
    assert "holds no run of jaxpar-launch" in capsys.readouterr().err
