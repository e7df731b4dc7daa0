"""What happens in a job stands in events.jsonl of the log folder, a line for each event, at once (row E10)."""

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from jaxpar_launch import LaunchSpec, StreamChoice, launch
from jaxpar_launch._events import Events
from jaxpar_launch._round import Round
from jaxpar_launch._timeline import runs_of_a_job, timeline
from jaxpar_launch.report import main

FAST = "last_call_timeout=0.5,keep_alive_interval=0.3,keep_alive_max_attempt=5,join_timeout=20"
FAILS_ONCE = """
import os, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        raise ValueError("boom")
    time.sleep(60)
"""
WAITS = """
import os, time
open(f"up{os.environ['RANK']}-{os.environ['WORLD_SIZE']}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
"""


def events_in(logs: Path) -> list[dict[str, Any]]:
    (path,) = logs.glob("*/events.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in events]


def facts(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    common = ("time", "host", "event")
    return [
        {key: value for key, value in event.items() if key not in common}
        for event in events
        if event["event"] == name
    ]


def test_a_restart_from_beginning_to_end(script, command, capsys) -> None:
    done = command("--nproc-per-node", 2, "--max-restarts", 1, "--log-dir", "logs", script(FAILS_ONCE))
    assert done.returncode == 0, done.stderr
    events = events_in(command.folder / "logs")
    first = ["worker_started", "worker_started", "worker_ended", "failure", "worker_ended", "restart"]
    again = ["rendezvous", "worker_started", "worker_started", "worker_ended", "worker_ended", "ended"]
    assert names(events) == ["launched", "rendezvous", *first, *again]
    assert [(event["round"], event["restarts"]) for event in events] == [(0, 0)] * 8 + [(1, 1)] * 6
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert {event["host"] for event in events} == {os.uname().nodename}
    pids = {(event["round"], event["rank"]): event["pid"] for event in facts(events, "worker_started")}
    assert len(set(pids.values())) == 4
    ended = {(event["round"], event["rank"]): event for event in facts(events, "worker_ended")}
    assert {key: event["pid"] for key, event in ended.items()} == pids
    assert ended[0, 1]["exit_code"] == 1 and ended[0, 0]["signal"] == "SIGTERM"
    assert ended[1, 0]["exit_code"] == ended[1, 1]["exit_code"] == 0
    meeting = facts(events, "rendezvous")[0]
    assert (meeting["ranks"], meeting["world_size"], meeting["group_rank"]) == ([0, 1], 2, 0)
    told = "rank 1 failed (exit code 1: ValueError: boom)"
    assert facts(events, "failure")[0]["text"] == told
    assert facts(events, "restart")[0]["text"] == f"{told}; all workers start again, restart 1 of 1"
    assert facts(events, "ended")[0]["exit_code"] == 0
    assert main([str(command.folder / "logs")]) == 0
    told = capsys.readouterr().out
    assert "the launcher ended: exit code 0" in told and "no progress" not in told
    assert main([str(command.folder / "logs"), "--attempt", "0"]) == 0
    assert "local rank 1 failed: ValueError: boom" in capsys.readouterr().out
    (path,) = (command.folder / "logs").glob("*/events.jsonl")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_signals_and_kills_are_noted(script, command, wait_until) -> None:
    path = script("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)" + WAITS)
    process = command.start("--grace-period", 0.3, "--log-dir", "logs", path)
    wait_until(lambda: (command.folder / "up0-1").exists(), what="the worker", timeout_s=20)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=10)  # nobody listens to it: the worker ends
    events = events_in(command.folder / "logs")
    assert facts(events, "signal_passed_on")[0]["name"] == "SIGUSR1"
    assert facts(events, "worker_ended")[0]["signal"] == "SIGUSR1"
    (command.folder / "up0-1").unlink()
    process = command.start("--grace-period", 0.3, "--log-dir", "others", path)
    wait_until(lambda: (command.folder / "up0-1").exists(), what="the worker", timeout_s=20)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    events = events_in(command.folder / "others")
    assert names(events)[3:] == ["signal", "killed", "worker_ended", "ended"]
    assert facts(events, "signal")[0]["name"] == "SIGTERM"
    assert facts(events, "killed")[0]["ranks"] == [0]
    assert facts(events, "ended")[0]["exit_code"] == 143


def test_a_hang_and_the_end_of_patience_are_noted(script, tmp_path: Path) -> None:
    path = script("import time, jaxpar_launch\njaxpar_launch.heartbeat('step 1')\ntime.sleep(60)")
    spec = LaunchSpec(command=(str(path),), hang_timeout_s=0.3, log_dir=str(tmp_path / "logs"))
    launch(spec, timeout_s=30)
    events = events_in(tmp_path / "logs")
    assert facts(events, "hang")[0]["text"] == "no progress: rank 0 in step 1"
    assert facts(events, "ended")[0] == {
        "round": 0, "restarts": 0, "exit_code": 124, "text": "jaxpar-launch: no progress: rank 0 in step 1",
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="did not end in time"):
        launch(LaunchSpec(command=(str(path),), log_dir=str(tmp_path / "late")), timeout_s=0.5)
    assert "out_of_time" in names(events_in(tmp_path / "late"))


def test_hosts_that_join_leave_and_are_lost(script, command, wait_until, unused_port, capsys) -> None:
    path, folder = script(WAITS), command.folder
    line = ["--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{unused_port}", "--rdzv-conf", FAST]

    def start(logs: str):
        return command.start(*line, "--max-restarts", 2, "--log-dir", f"logs/{logs}", path)

    first = start("a")
    wait_until(lambda: (folder / "up0-1").exists(), what="one host", timeout_s=20)
    second = start("b")
    wait_until(lambda: (folder / "up1-2").exists(), what="two hosts", timeout_s=20)
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=20)
    (folder / "up1-2").unlink()
    wait_until(
        lambda: names(events_in(folder / "logs" / "a")).count("rendezvous") == 3, what="one", timeout_s=20
    )
    third = start("c")
    wait_until(lambda: (folder / "up1-2").exists(), what="two again", timeout_s=20)
    third.kill()
    wait_until(
        lambda: names(events_in(folder / "logs" / "a")).count("rendezvous") == 5, what="one", timeout_s=20
    )
    (folder / "go").touch()
    _, stderr = first.communicate(timeout=20)
    assert first.returncode == 0, stderr
    assert stderr.count("logs are in") == 1
    events = events_in(folder / "logs" / "a")
    changes = [
        event for event in names(events) if event in ("gathering", "joined", "left", "lost", "restart")
    ]
    one = ["gathering", "joined", "restart"]
    assert changes == [
        *one,
        "gathering",
        "left",
        "restart",
        *one,
        "gathering",
        "lost",
        "restart",
        "gathering",
    ]
    assert [event["restarts"] for event in facts(events, "rendezvous")] == [0, 0, 0, 0, 1]
    assert [event["world_size"] for event in facts(events, "rendezvous")] == [1, 2, 1, 2, 1]
    assert "joined" in facts(events, "joined")[0]["text"]
    assert "was told to end" in facts(events, "left")[0]["text"]
    gone = events_in(folder / "logs" / "b")
    assert facts(gone, "rendezvous")[0]["ranks"] == [1]
    assert names(gone)[-3:] == ["signal", "worker_ended", "ended"]
    for name in "abc":  # folders side by side
        (run,) = (folder / "logs" / name).iterdir()
        run.rename(folder / "logs" / run.name)
        (folder / "logs" / name).rmdir()
    assert main([str(folder / "logs"), "--events"]) == 0
    told = capsys.readouterr().out
    assert told.count("launched: 1 worker,") == 3 and told.count("restart: ") >= 4


def test_whose_workers_are_done_hears_of_a_failure_elsewhere(
    script, command, wait_until, unused_port
) -> None:
    path = script("""
        import os, time
        while os.environ["RANK"] == "1":
            if os.path.exists("go"):
                raise ValueError("boom")
            time.sleep(0.02)
    """)
    line = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{unused_port}", "--rdzv-conf", FAST, path]
    launchers = [command.start("--log-dir", f"logs{i}", "--node-rank", i, *line) for i in range(2)]
    logs = command.folder / "logs0"
    wait_until(
        lambda: list(logs.glob("*/events.jsonl")) and "worker_ended" in names(events_in(logs)),
        what="the end of the first host's worker",
        timeout_s=20,
    )
    (command.folder / "go").touch()
    for launcher in launchers:
        launcher.communicate(timeout=20)
    told = names(events_in(logs))
    assert told[-3:] == ["worker_ended", "failure", "ended"]
    assert "rank 1 on host" in facts(events_in(logs), "failure")[0]["text"]


def test_a_job_that_never_began_says_so(command) -> None:
    line = ["--nnodes", 2, "--rdzv-endpoint", "192.0.2.1:29400", "--rdzv-conf", "join_timeout=0.3"]
    done = command(*line, "--log-dir", "logs", "--no-python", "true")
    assert done.returncode == 1
    events = events_in(command.folder / "logs")
    assert names(events) == ["launched", "ended"]
    assert facts(events, "ended")[0]["text"].startswith("no rendezvous at 192.0.2.1:29400 within 0.3 s")
    assert main([str(command.folder / "logs"), "--events"]) == 0


def test_without_a_log_folder_nothing_is_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    launch(["true"], kind="program", timeout_s=20).check()
    assert list(tmp_path.rglob("*")) == []
    spec = LaunchSpec(command=("true",), kind="program", redirects=StreamChoice(default=3))
    launch(spec, timeout_s=20).check()
    assert len(list(tmp_path.rglob("events.jsonl"))) == 1


def test_a_line_is_one_write_and_a_full_disk_stops_nobody(tmp_path: Path, monkeypatch) -> None:
    events, writes, write = Events(str(tmp_path), "a"), [], os.write
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(data) or write(fd, data))
    events.turn_to(
        Round(
            number=3, restart_count=2, world_size=1, first_rank=0, group_rank=0, group_world_size=1,
            master_addr="a", master_port=1, store=None, store_token=None,
        )
    )  # fmt: skip
    events.note("failure", text="two\nlines")
    events.note("ended", exit_code=1)
    assert [data.count(b"\n") for data in writes] == [1, 1]
    assert b"".join(writes) == (tmp_path / "events.jsonl").read_bytes()
    assert json.loads(writes[0])["round"] == 3 and json.loads(writes[0])["restarts"] == 2

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    events.note("restart", text="")
    assert events.status == "restarting"
    events.close()


def write_run(folder: Path, name: str, lines: list[dict[str, Any]]) -> None:
    (folder / name).mkdir(parents=True)
    common = {"host": name, "round": 0, "restarts": 0}
    text = "".join(
        json.dumps(common | line | {"time": f"2026-01-31T09:30:{line['time']:06.3f}Z"}) + "\n"
        for line in lines
    )
    (folder / name / "events.jsonl").write_text(text)


def test_the_timeline_is_of_one_job_and_of_all_its_hosts(tmp_path: Path, capsys) -> None:
    def launched(time: float, run_id: str) -> dict[str, Any]:
        return {"time": time, "event": "launched", "nproc": 2, "pid": 7, "run_id": run_id}

    started = [
        {"time": 11 + rank / 10, "event": "worker_started", "rank": rank, "local_rank": rank, "pid": 9}
        for rank in range(2)
    ]
    killed = {"time": 20, "event": "worker_ended", "rank": 1, "pid": 9, "signal": "SIGKILL"}
    ended = {"time": 21.5, "event": "ended", "exit_code": 137, "text": "x"}
    write_run(tmp_path, "a", [launched(10, "j"), *started, killed, ended])
    write_run(tmp_path, "left", [launched(10.5, "j"), {**ended, "time": 12}])
    write_run(tmp_path, "before", [launched(1, "j"), {**ended, "time": 9}])
    write_run(tmp_path, "other", [launched(10, "k"), {**ended, "time": 20}])
    with (tmp_path / "a" / "events.jsonl").open("a") as file:
        file.write('{"time": "2026')  # the disk was full
    assert [Path(run).name for run in runs_of_a_job(str(tmp_path))] == ["a", "left"]
    assert main([str(tmp_path), "--events"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "    from 2026-01-31T09:30:10.000Z",
        "    0.000 s  a     round 0  launched: 2 workers, pid 7",
        "    0.500 s  left  round 0  launched: 2 workers, pid 7",
        "    1.000 s  a     round 0  workers started: ranks 0-1",
        "    2.000 s  left  round 0  ended: exit code 137: x",
        "   10.000 s  a     round 0  worker ended: rank 1, signal SIGKILL",
        "   11.500 s  a     round 0  ended: exit code 137: x",
    ]
    assert runs_of_a_job(str(tmp_path / "other")) == [str(tmp_path / "other")]
    assert timeline([]) == "no events"
    assert main([str(tmp_path / "nowhere"), "--events"]) == 2
    assert "holds no events.jsonl" in capsys.readouterr().err
