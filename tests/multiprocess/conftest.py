"""Processes without a launcher: each is given its arguments, all end within a deadline, output is kept per process."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

collect_ignore_glob = ["workers/*"]  # scripts that are run, not imported in search of doctests
WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Ended:
    """How one process ended. A process that had to be killed at the deadline has returncode None."""

    returncode: int | None
    output: str
    duration_s: float


Start = Callable[..., list[Ended]]


@pytest.fixture(autouse=True, scope="module")
def compile_quickly() -> Iterator[None]:
    """As in all tests, and for processes that inherit the environment too: each compiles every program."""
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def free_port() -> int:
    """A port below the ephemeral range's traffic, free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(worker, [args of process 0, args of process 1, ...], deadline_s=...)` runs a script of workers/."""
    running: list[subprocess.Popen[str]] = []

    def run(
        worker: str,
        arguments: Sequence[Sequence[object]],
        *,
        deadline_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
    ) -> list[Ended]:
        begin = time.monotonic()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX")}
        clean |= {"JAX_PLATFORMS": "cpu", "PYTHONFAULTHANDLER": "1"} | dict(environment or {})
        for words in arguments:
            command = [sys.executable, str(WORKERS / worker), *map(str, words)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            running.append(subprocess.Popen(command, env=clean, **pipes))
        return [_end(process, begin, begin + deadline_s) for process in running[-len(arguments) :]]

    yield run
    for process in running:
        if process.poll() is None:
            process.kill()
            process.wait()


def _end(process: "subprocess.Popen[str]", begin: float, deadline: float) -> Ended:
    try:
        output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        return Ended(process.returncode, output, time.monotonic() - begin)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return Ended(None, output, time.monotonic() - begin)
