"""The first failure ends the group within 5 s and is reported as the root cause (case LJ-5)."""

import socket
import time
from pathlib import Path

import pytest

from jaxpar_launch import Failure, LaunchFailedError, LaunchTimeoutError, launch
from jaxpar_launch._report import ranked

# Rank 0 waits for rank 1 in a blocking read, as in a collective; rank 1 fails at line 8.
WORKER = """
import os, signal, socket, sys, time
if os.environ["RANK"] == "0":
    with socket.create_server(("127.0.0.1", 0)) as server:
        print("rank 0 waits", flush=True)
        server.accept()
time.sleep(0.2)
{failure}
time.sleep(60)
"""

VARIANTS = {
    "exception": ('raise ValueError("boom")', 1, "exit code 1: ValueError: boom"),
    "exit": ("sys.exit(3)", 3, "exit code 3: SystemExit: 3"),
    "exit text": ('sys.exit("no data")', 1, "exit code 1: SystemExit: no data"),
    "abort": ("os.abort()", 134, "signal 6 (SIGABRT): Aborted"),
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "signal 11 (SIGSEGV): Segmentation fault"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal 9 (SIGKILL)"),
    "hard exit": ("os._exit(7)", 7, "exit code 7"),
    "import": ("import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_failed_rank_is_blamed_and_the_others_are_ended(variant: str, script) -> None:
    failure, exit_code, cause = VARIANTS[variant]
    path = script(WORKER.format(failure=failure))
    start = time.monotonic()
    result = launch(path, nproc=2, timeout_s=20)
    assert time.monotonic() - start < 5
    assert result.exit_code == exit_code
    assert [failure.rank for failure in result.failures] == [1]
    lines = result.report.splitlines()
    assert lines[0] == "jaxpar-launch: rank 1 failed first and ended the job."
    assert cause in result.report
    assert [line.split()[0] for line in lines[-3:]] == ["rank", "0", "1"]
    assert lines[-2].endswith("stopped by the launcher: signal 15 (SIGTERM)")
    assert cause in lines[-1] and lines[-1].endswith("<- failed first")
    if variant not in ("killed", "hard exit"):  # nobody can tell where those happened
        assert f"at {path}:8" in result.report


def test_failure_at_the_import_of_the_users_own_module(script) -> None:
    module = script("\nlimit = 1 / 0\n", name="limits.py")
    result = launch(script("import limits"), nproc=2, timeout_s=20)
    assert result.exit_code == 1
    assert f"ZeroDivisionError: division by zero\n  at {module}:2" in result.report


def test_a_syntax_error_is_placed(script) -> None:
    path = script("x = 1\nif x\n")
    result = launch(path, timeout_s=20)
    assert f"at {path}:2" in result.report and "SyntaxError" in result.report


def test_the_library_is_not_blamed_for_the_users_call(script) -> None:
    path = script("import json\n\njson.loads('{')\n")
    assert f"at {path}:3" in launch(path, timeout_s=20).report


def test_an_early_exit_with_0_neither_ends_nor_hangs_the_others(script) -> None:
    path = script("""
        import os, sys, time
        if os.environ["RANK"] == "0":
            sys.exit(0)
        time.sleep(0.5)
        print("done")
    """)
    result = launch(path, nproc=2, timeout_s=20)
    assert (result.exit_code, result.output, result.report) == (0, ("", "done\n"), "")


def test_a_worker_that_ignores_sigterm_is_killed_soon_after_a_failure(script) -> None:
    path = script("""
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)   # as JAX's preemption notifier does
        time.sleep(0.3)
        if os.environ["RANK"] == "2":
            raise ValueError("boom")
        time.sleep(60)
    """)
    start = time.monotonic()
    result = launch(path, nproc=3, timeout_s=20)
    assert time.monotonic() - start < 5
    assert result.failures[0].rank == 2
    assert result.report.count("killed by the launcher: it had not ended within the grace period") == 2


def test_children_of_workers_end_with_them(script, living, wait_until) -> None:
    child = script("import time; time.sleep(60)", name="child.py")
    path = script(f"""
        import os, subprocess, sys, time
        subprocess.Popen([sys.executable, {str(child)!r}])
        time.sleep(0.3)
        sys.exit(int(os.environ["RANK"]))
    """)
    result = launch(path, nproc=2, timeout_s=20)
    assert result.exit_code == 1
    wait_until(lambda: not living(), what="the grandchildren to end")


def test_a_lost_peer_is_never_blamed_before_the_peer() -> None:
    common = dict(host="h", pid=1, file=None, line=None, tail=())
    victim = Failure(
        rank=0,
        local_rank=0,
        exit_code=1,
        time_s=1.0,
        message="Gloo all-reduce failed: Connection reset by peer",
        **common,
    )
    aborted = Failure(
        rank=2, local_rank=2, exit_code=-6, time_s=1.1, message=None,
        **common | dict(tail=("Terminating process because the JAX distributed service detected ... heartbeat timeout",)),
    )  # fmt: skip
    culprit = Failure(rank=1, local_rank=1, exit_code=-9, time_s=1.2, message=None, **common)
    assert [failure.rank for failure in ranked([victim, culprit, aborted])] == [1, 0, 2]


def test_of_several_failures_the_earliest_is_the_cause() -> None:
    common = dict(host="h", pid=1, exit_code=1, message="ValueError", file=None, line=None, tail=())
    failures = [
        Failure(rank=rank, local_rank=rank, time_s=time_s, **common)
        for rank, time_s in enumerate((3.0, 1.0, 2.0))
    ]
    assert [failure.rank for failure in ranked(failures)] == [1, 2, 0]


def test_who_failed_before_is_the_cause_though_it_takes_longer_to_end(script) -> None:
    path = script("""
        import os, time
        from jaxpar_launch._run import write_error_file
        if os.environ["RANK"] == "1":
            write_error_file(os.environ["JAXPAR_ERROR_FILE"], ValueError("boom"))
            print("written", flush=True)
            time.sleep(60)  # as one that writes its files
        while not os.path.exists(os.path.dirname(os.environ["JAXPAR_ERROR_FILE"]) + "/../1/error.json"):
            time.sleep(0.01)
        raise RuntimeError("rank 1 did not come")
    """)
    environ = {"PYTHONPATH": str(Path(__file__).parents[2] / "launch")}
    result = launch(path, nproc=2, timeout_s=20, environ=environ)
    assert [(failure.rank, failure.message) for failure in result.failures] == [
        (1, "ValueError: boom"),
        (0, "RuntimeError: rank 1 did not come"),
    ]
    assert result.exit_code == 1
    assert "rank 1 failed first" in result.report


def test_a_failure_says_which_process_it_was(script) -> None:
    path = script("import os, time; print(os.getpid(), time.time()); os._exit(7)")
    result = launch(path, timeout_s=20)
    pid, ended = result.output[0].split()
    (failure,) = result.failures
    assert (failure.rank, failure.local_rank, failure.pid, failure.exit_code) == (0, 0, int(pid), 7)
    assert failure.host == socket.gethostname() and 0 <= failure.time_s - float(ended) < 5
    assert f"host {failure.host}, pid {pid}, at " in result.report


def test_a_hanging_job_ends_at_its_deadline_with_every_ranks_stack(script) -> None:
    path = script("""
        import time
        def stuck():
            time.sleep(60)
        stuck()
    """)
    with pytest.raises(LaunchTimeoutError, match="did not end in time") as error:
        launch(path, nproc=2, timeout_s=1.5)
    assert str(error.value).count(f'File "{path}", line 4 in stuck') == 2


def test_check_raises_the_report(script) -> None:
    path = script("raise ValueError('boom')")
    with pytest.raises(LaunchFailedError, match="rank 0 failed first"):
        launch(path, timeout_s=20).check()
