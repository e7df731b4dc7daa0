"""What happens to a job when something dies: found after how long, running again after how long, and nothing left behind.

    worker of 2        SIGKILL, SIGSEGV, exception, hang, early exit with 0, slow start
    launcher of 1      SIGTERM, SIGKILL
    launcher of 2      SIGKILL of one that serves nothing (its host comes back), of the one that serves the meeting
    one host           a port that is taken, 20 launches at once, 64 workers, 100 MB of output

Every row is a fault that is made to happen; the script fails if the outcome is another one than it should be, or if a process is
left. Workers are plain Python, so the times are the launcher's own. `--quick` leaves out the last three.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from _common import Result, emit, is_quick

LAUNCH_FOLDER = Path(__file__).resolve().parents[1] / "launch"
WORKER = """
import os, signal, sys, time
from jaxpar_launch import heartbeat
kind, rank, attempt = sys.argv[1], os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
last = str(int(os.environ["WORLD_SIZE"]) - 1)
if kind == "slow start" and rank == last:
    time.sleep(2)
heartbeat("start")
print("up", attempt, rank, os.getpid(), flush=True)
if attempt or kind == "slow start":
    sys.exit()
time.sleep(0.3)
if rank == last and kind != "wait":
    print("fault", flush=True)
    if kind == "SIGSEGV":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "exception":
        raise ValueError("boom")
    if kind == "early exit with 0":
        sys.exit(0)
    if kind == "output":
        line = "x" * 999
        for _ in range(100_000):
            print(line)
        print("last line", flush=True)
        sys.exit(0)
while kind in ("SIGSEGV", "exception", "wait"):
    heartbeat("work")
    time.sleep(0.05)
time.sleep(60 if kind == "hang" else 1)
"""
LIMIT_S = 60.0


class Job:
    """A launcher, and the lines that came of it with their times."""

    def __init__(self, folder: str, *options: object, kind: str) -> None:
        script = Path(folder) / "worker.py"
        script.write_text(WORKER)
        self.folder = folder
        environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(LAUNCH_FOLDER), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-S", "-m", "jaxpar_launch", *map(str, options), str(script), kind]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )
        self.lines: list[tuple[float, str]] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Iterator[str]) -> None:
        for line in stream:
            self.lines.append((time.perf_counter(), line))

    def wait_for(self, text: str, count: int = 1) -> float:
        """When so many lines with this text had come."""
        until = time.perf_counter() + LIMIT_S
        while time.perf_counter() < until:
            found = [at for at, line in list(self.lines) if text in line]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.002)
        raise RuntimeError(f"no {text!r} came: {self.text}")

    def pid_of(self, rank: int) -> int:
        """The process of a worker of the first attempt."""
        return next(int(line.split()[-1]) for _, line in self.lines if f"up 0 {rank} " in line)

    def end(self, code: int) -> float:
        """When it ended; with this exit code, and nothing left."""
        found = self.process.wait(timeout=LIMIT_S)
        at = time.perf_counter()
        for reader in self._readers:
            reader.join(timeout=LIMIT_S)
        if found != code:
            raise RuntimeError(f"exit code {found}, not {code}: {self.text}")
        return at

    @property
    def text(self) -> str:
        return "".join(line for _, line in self.lines)[-3000:]


def main(argv: list[str] | None = None) -> int:
    """Prints one JSON line per fault."""
    quick = is_quick(argv, __doc__)
    results = [*map(_worker, ("SIGKILL", "SIGSEGV", "exception", "hang"))]
    results += [_harmless("early exit with 0"), _harmless("slow start")]
    results += [_launcher(signal.SIGTERM), _launcher(signal.SIGKILL), _lost(), _meeting_lost(), _port_taken()]
    results += [] if quick else [_many_launches(), _many_workers(), _much_output()]
    return emit(*results)


@contextlib.contextmanager
def _place() -> Iterator[str]:
    """A folder, and in the end no process that runs a script in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder
        until = time.perf_counter() + 5
        while left := _living(folder):
            if time.perf_counter() > until:
                raise RuntimeError(f"left alive: {left}")
            time.sleep(0.01)


def _living(folder: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if folder in line and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(line)
    return found


def _row(fault: str, metric: str, seconds: float, target_s: float) -> Result:
    return Result("faults", fault, metric, seconds * 1e3, "ms", target=f"value <= {target_s * 1e3:g}")


def _worker(kind: str) -> Result:
    """One of two fails; both run again."""
    options = ["--nproc-per-node", 2, "--max-restarts", 1]
    options += ["--hang-timeout", 1] if kind == "hang" else []
    with _place() as folder:
        job = Job(folder, *options, kind="wait" if kind == "SIGKILL" else kind)
        job.wait_for("up 0", 2)
        if kind == "SIGKILL":
            start = time.perf_counter()
            os.kill(job.pid_of(1), signal.SIGKILL)
        else:
            start = job.wait_for("fault")
        again = job.wait_for("up 1", 2)
        job.end(0)
    # A hang is found after its timeout, and ends after the time that its workers are given for that.
    return _row(f"worker: {kind}", "to all running again", again - start, 3.5 if kind == "hang" else 1.5)


def _harmless(kind: str) -> Result:
    with _place() as folder:
        job = Job(folder, "--nproc-per-node", 2, kind=kind)
        start = job.wait_for("up 0")
        return _row(f"worker: {kind}", "to the end of the job, exit code 0", job.end(0) - start, 5)


def _launcher(signum: signal.Signals) -> Result:
    with _place() as folder:
        job = Job(folder, "--nproc-per-node", 2, kind="wait")
        job.wait_for("up 0", 2)
        start = time.perf_counter()
        job.process.send_signal(signum)
        job.end(143 if signum == signal.SIGTERM else -signum)
        while _living(folder):
            time.sleep(0.005)
            if time.perf_counter() - start > LIMIT_S:
                raise RuntimeError("its workers live on")
        return _row(f"launcher: {signum.name}", "to no worker left", time.perf_counter() - start, 5)


def _hosts(folder: str, num: int) -> tuple[list[Job], list[object]]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--nnodes", num, "--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", 2]
    first = Job(folder, *options, kind="wait")
    while not _listens(port):
        time.sleep(0.01)
    jobs = [first, *(Job(folder, *options, kind="wait") for _ in range(num - 1))]
    for job in jobs:
        job.wait_for("up 0")
    return jobs, options


def _listens(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _lost() -> Result:
    """A host that serves nothing dies, and comes back."""
    with _place() as folder:
        (first, second), options = _hosts(folder, 2)
        start = time.perf_counter()
        second.process.kill()
        third = Job(folder, *options, kind="wait")
        again = max(first.wait_for("up 1"), third.wait_for("up 1"))
        first.end(0)
        third.end(0)
        return _row("2 hosts, launcher: SIGKILL, started anew", "to all running again", again - start, 10)


def _meeting_lost() -> Result:
    with _place() as folder:
        (first, second), _ = _hosts(folder, 2)
        start = time.perf_counter()
        first.process.kill()
        return _row(
            "2 hosts, launcher that serves: SIGKILL", "to the other's end, code 1", second.end(1) - start, 10
        )


def _port_taken() -> Result:
    import socket

    with _place() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        start = time.perf_counter()
        job = Job(folder, "--nproc-per-node", 2, "--master-port", server.getsockname()[1], kind="wait")
        end = job.end(2)
        if "is in use by another process" not in job.text:
            raise RuntimeError(job.text)
        return _row("one host: the port is taken", "to the end, code 2", end - start, 5)


def _many_launches() -> Result:
    with _place() as folder:
        start = time.perf_counter()
        jobs = [Job(folder, "--nproc-per-node", 2, kind="slow start") for _ in range(20)]
        return _row(
            "one host: 20 launches of 2 workers at once",
            "to the end of all",
            max(j.end(0) for j in jobs) - start,
            60,
        )


def _many_workers() -> Result:
    with _place() as folder:
        job = Job(folder, "--nproc-per-node", 64, "--max-restarts", 1, kind="wait")
        job.wait_for("up 0", 64)
        start = time.perf_counter()
        os.kill(job.pid_of(63), signal.SIGKILL)
        again = job.wait_for("up 1", 64)
        job.end(0)
        return _row("one host: SIGKILL of one of 64 workers", "to all running again", again - start, 30)


def _much_output() -> Result:
    with _place() as folder:
        job = Job(folder, "--nproc-per-node", 2, kind="output")
        start = job.wait_for("fault")
        end = job.end(0)
        num_lines = sum("x" * 999 in line for _, line in job.lines)
        if num_lines != 100_000 or not any("last line" in line for _, line in job.lines):
            raise RuntimeError(f"{num_lines} of 100000 lines came")
        return _row("one host: 100 MB of output of a worker", "to the last line", end - start, 60)


if __name__ == "__main__":
    raise SystemExit(main())
