"""What the launcher's tests share: workers as text, the command with a deadline, and a look at what is left alive."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LIMIT_S = 90.0  # of a launcher that a test started
LAUNCH_FOLDER = Path(__file__).parents[2] / "launch"


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Whoever started pytest in the background had SIGINT ignored, and a launcher would stay so (`nohup` stays `nohup`)."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """Writes a worker script into the test's own folder."""

    def write(source: str, *, name: str = "worker.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    return write


class Command:
    """`jaxpar-launch` as a process: isolated from site-packages, in the test's folder, never longer than a deadline."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(LAUNCH_FOLDER), "HOME": str(folder)}
        self._started: list[subprocess.Popen[str]] = []
        self._timers: list[threading.Timer] = []

    def start(self, *args: object, **popen: object) -> subprocess.Popen[str]:
        """Starts it; stdout and stderr are pipes unless said otherwise."""
        command = [sys.executable, "-S", "-m", "jaxpar_launch", *map(str, args)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=self.folder, env=self.environ, **(streams | popen))  # pyright: ignore
        self._started.append(process)
        # A blocking read of what it says ends with it; the guard takes its workers along.
        timer = threading.Timer(LIMIT_S, process.kill)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)
        return process

    def __call__(self, *args: object, timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
        """Runs it to its end."""
        process = self.start(*args)
        stdout, stderr = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for process in self._started:
            process.kill()
            if process.stdout is not None:
                process.communicate()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """The command; nothing that a test started with it may outlive the test."""
    command = Command(tmp_path)
    yield command
    command.close()
    _wait_until(lambda: not _living(tmp_path), what="all processes of this test to end")


@pytest.fixture
def living(tmp_path: Path) -> Callable[[], list[int]]:
    """Processes that name the test's folder in their command line: workers and grandchildren run scripts from it."""
    return lambda: _living(tmp_path)


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """`wait_until(condition, what=..., timeout_s=...)` polls; it fails the test at the deadline."""
    return _wait_until


@pytest.fixture(scope="module")
def start_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """`start_etcd(*options, protocol="http")` gives the address of an etcd (a real one, where it is installed) of this module's tests."""
    if (program := shutil.which("etcd")) is None:
        pytest.skip("needs etcd: apt-get install etcd-server")
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: object, protocol: str = "http") -> str:
        address = f"127.0.0.1:{free_port()}"
        client, peer = f"{protocol}://{address}", f"http://127.0.0.1:{free_port()}"
        urls = ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        urls += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        data = tmp_path_factory.mktemp("etcd") / "data"
        line = [program, "--data-dir", data, "--log-outputs", "stderr", *urls, *map(str, options)]
        started.append(subprocess.Popen(line, stderr=subprocess.DEVNULL))
        return address

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=10)


@pytest.fixture
def unused_port() -> int:
    """A port of loopback that nobody listens at."""
    return free_port()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _living(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command_line = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # ended meanwhile
                continue
            if str(folder).encode() in command_line and state != "Z":
                found.append(int(entry.name))
    return found


def _wait_until(condition: Callable[[], object], *, what: str, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)
