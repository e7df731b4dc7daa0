"""Signals to the launcher reach every worker, and nothing survives it, whatever ends it (cases LJ-3, LJ-5; row E5)."""

import signal
import time

import pytest

# Reports every signal it gets, starts a child that would outlive it, and obeys or not.
WORKER = """
import os, signal, subprocess, sys, time
rank, obeys = os.environ["RANK"], sys.argv[2] == "obeys"
def take(signum, frame):
    os.write(1, f"{signal.Signals(signum).name}\\n".encode())  # print is not reentrant
    if signum in (signal.SIGTERM, signal.SIGINT) and obeys:
        sys.exit(0)
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(signum, take)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", sys.argv[1]])
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def job(command, script, tmp_path):
    """Starts two such workers; returns the launcher once both are ready."""

    def start(obedience: str, *options: object):
        path = script(WORKER)
        process = command.start("--nproc-per-node", 2, *options, path, tmp_path, obedience)
        ready = sorted(process.stdout.readline() for _ in range(2))
        assert ready == ["[rank 0] ready\n", "[rank 1] ready\n"]
        return process

    return start


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_ending_signal_reaches_all_and_nothing_survives(signum, job, living) -> None:
    process = job("obeys")
    start = time.monotonic()
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=10)
    assert time.monotonic() - start < 3
    assert process.returncode == 128 + signum
    assert sorted(stdout.splitlines()) == [f"[rank {rank}] {signum.name}" for rank in (0, 1)]
    assert f"ended by {signum.name}" in stderr
    assert stderr.count("stopped by the launcher: exit code 0") == 2
    assert not living()


def test_the_grace_period_is_kept_and_then_they_are_killed(job, living) -> None:
    process = job("disobeys", "--grace-period", "0.5")
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=10)
    assert 0.5 <= time.monotonic() - start < 3
    assert process.returncode == 143
    assert "the workers have 0.5 s to end" in stderr
    assert stderr.count("killed by the launcher: it had not ended within the grace period") == 2
    assert not living()


def test_a_worker_has_the_grace_period_to_save_its_work(command, script, tmp_path) -> None:
    path = script("""
        import os, signal, sys, time
        def save(signum, frame):
            time.sleep(0.5)
            open(f"{sys.argv[1]}/saved{os.environ['RANK']}", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        while True:  # one long sleep would miss a signal that comes just before it begins
            time.sleep(0.02)
    """)
    process = command.start("--nproc-per-node", 2, "--grace-period", 10, path, tmp_path)
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 143
    assert sorted(file.name for file in tmp_path.glob("saved*")) == ["saved0", "saved1"]


def test_a_second_signal_kills_at_once(job, living) -> None:
    process = job("disobeys")
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert time.monotonic() - start < 5
    assert process.returncode == 130
    assert not living()


def test_a_killed_launcher_takes_workers_and_their_children_along(job, living, wait_until) -> None:
    process = job("disobeys")
    # Launcher, two workers, two grandchildren: a new process has its name only once it has replaced its parent's copy.
    wait_until(lambda: len(living()) >= 5, what="all processes to be there", timeout_s=5)
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: not living(), what="all processes to end", timeout_s=5)


def test_usr1_is_passed_on_once_and_ends_nobody(job) -> None:
    process = job("obeys")
    start = time.monotonic()
    process.send_signal(signal.SIGUSR1)
    got = sorted(process.stdout.readline() for _ in range(2))
    assert time.monotonic() - start < 1
    assert got == ["[rank 0] SIGUSR1\n", "[rank 1] SIGUSR1\n"]
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=10)
    assert sorted(stdout.splitlines()) == ["[rank 0] SIGTERM", "[rank 1] SIGTERM"]


def test_nohup_stays_nohup(job) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited by the launcher, as from nohup
    try:
        process = job("obeys")
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=10)
    assert "SIGHUP" not in stdout
