"""A failure ends all workers, and all start again, as often as --max-restarts says (rows E2, E4, E7, W22)."""

import json
import os
import signal
from pathlib import Path

import pytest

from jaxpar_launch import LaunchSpecError, launch
from jaxpar_launch._spec import LaunchSpec

# Every worker notes its place in each attempt; rank 1 fails until the attempt that its argument names.
WORKER = """
import json, os, sys, time
place = {name: os.environ[name] for name in ("RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")}
place |= {"address": os.environ["JAXPAR_COORDINATOR"], "store": os.environ["JAXPAR_STORE"], "pid": os.getpid()}
attempt = int(place["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, flush=True)
mine = f"places/{attempt}.{place['RANK']}"
with open(mine + ".new", "w") as file:
    json.dump(place, file)
os.rename(mine + ".new", mine)
while not all(os.path.exists(f"places/{attempt}.{rank}") for rank in range(2)):
    time.sleep(0.01)
if attempt < int(sys.argv[1]):
    if place["RANK"] == "1":
        raise ValueError(f"boom {attempt}")
    time.sleep(60)
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "places").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "places"


def noted(places: Path, attempt: int, rank: int) -> dict:
    return json.loads((places / f"{attempt}.{rank}").read_text())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_all_workers_start_again_at_a_new_place(script, places: Path) -> None:
    result = launch([script(WORKER), "2"], nproc=2, max_restarts=3, timeout_s=30).check()
    assert result.output[0].split("\n")[:-1] == ["attempt 0", "attempt 1", "attempt 2"]
    seen = [[noted(places, attempt, rank) for rank in range(2)] for attempt in range(3)]
    for attempt, of_ranks in enumerate(seen):
        assert {place["TORCHELASTIC_RESTART_COUNT"] for place in of_ranks} == {str(attempt)}
        assert {place["TORCHELASTIC_MAX_RESTARTS"] for place in of_ranks} == {"3"}
        assert len({(place["address"], place["store"]) for place in of_ranks}) == 1  # one meeting place
    for what in ("address", "store"):
        assert len({of_ranks[0][what] for of_ranks in seen}) == 3  # and a new one in each attempt
    assert not any(is_alive(place["pid"]) for of_ranks in seen for place in of_ranks)


def test_after_the_last_restart_the_job_fails_and_tells_its_story(script, places: Path) -> None:
    result = launch([script(WORKER), "9"], nproc=2, max_restarts=2, timeout_s=30)
    assert result.exit_code == 1
    assert not (places / "3.0").exists()
    lines = result.report.splitlines()
    assert lines[0] == "jaxpar-launch: rank 1 failed first and ended the job."
    assert "exit code 1: ValueError: boom 2" in result.report
    assert lines[-3:] == [
        "  before that:",
        "  - rank 1 failed (exit code 1: ValueError: boom 0); all workers start again, restart 1 of 2",
        "  - rank 1 failed (exit code 1: ValueError: boom 1); all workers start again, restart 2 of 2",
    ]


def test_each_attempt_keeps_its_logs(script, places: Path, command) -> None:
    result = command("--nproc-per-node", 2, "--max-restarts", 1, "--log-dir", "logs", script(WORKER), 1)
    assert result.returncode == 0, result.stderr
    assert (
        "jaxpar-launch: rank 1 failed (exit code 1: ValueError: boom 0); all workers start again"
        in result.stderr
    )
    (run,) = (places.parent / "logs").iterdir()
    for attempt in range(2):
        for rank in range(2):
            log = (run / f"attempt_{attempt}" / str(rank) / "stdout.log").read_text()
            assert log == f"attempt {attempt}\n"
    assert "boom 0" in (run / "attempt_0" / "1" / "error.json").read_text()


def test_a_killed_worker_is_replaced(script, places: Path, command, wait_until) -> None:
    process = command.start(
        "--nproc-per-node", 2, "--max-restarts", 1, script(WORKER.replace("raise", "pass #")), 1
    )
    wait_until(
        lambda: all((places / f"0.{rank}").exists() for rank in range(2)), what="both workers", timeout_s=20
    )
    os.kill(noted(places, 0, 0)["pid"], signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 0, stderr
    assert "rank 0 failed (signal 9 (SIGKILL)); all workers start again, restart 1 of 1" in stderr
    assert stdout.count("attempt 1") == 2


def test_a_job_that_is_told_to_end_does_not_start_again(script, places: Path, command, wait_until) -> None:
    waiting = "import os, time\nopen('places/' + os.environ['RANK'], 'w').close()\ntime.sleep(60)\n"
    process = command.start("--nproc-per-node", 2, "--max-restarts", 5, script(waiting))
    wait_until(lambda: all((places / str(rank)).exists() for rank in range(2)), what="both", timeout_s=20)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "start again" not in stderr


def test_a_job_out_of_time_does_not_start_again(script, places: Path) -> None:
    from jaxpar_launch import LaunchTimeoutError

    with pytest.raises(LaunchTimeoutError):
        launch([script(WORKER.replace("raise", "pass #")), "9"], nproc=2, max_restarts=5, timeout_s=1.5)
    assert not (places / "1.0").exists()


def test_a_named_port_is_used_in_every_attempt(script, places: Path, command) -> None:
    from jaxpar_launch._ports import PortReservation

    drawn = PortReservation.draw("127.0.0.1")
    drawn.close()
    result = command(
        "--nproc-per-node", 2, "--max-restarts", 1, "--master-port", drawn.port, script(WORKER), 1
    )
    assert result.returncode == 0, result.stderr
    assert {noted(places, attempt, 0)["address"] for attempt in range(2)} == {f"127.0.0.1:{drawn.port}"}


def test_fewer_restarts_than_none_are_refused() -> None:
    with pytest.raises(LaunchSpecError, match="--max-restarts -1: a job cannot restart less than never"):
        LaunchSpec(command=("true",), kind="program", max_restarts=-1)
