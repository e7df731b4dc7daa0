"""Time from the command to a worker's first line, and from a worker's death to all doing again what they did: against torchrun.

    t0  exec of `python -m jaxpar_launch ...` or `python -m torch.distributed.run ...`
    t1  the first line of a worker that only prints arrives here

    t0  SIGKILL of one of two workers, with --max-restarts 1
    t1  both print again: at once; after a collective over both (jaxpar, or PyTorch with Gloo); or after a training step,
        with and without --compilation-cache-dir

Both run in the same Python, so that both pay the same interpreter start: this one if it has torch (the
`bench` extra), else the one given by `--torch-python`. Without torch the time is printed without baseline.
"""

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from _common import Result, emit, interleave

HERE = Path(__file__).resolve().parent
PATHS = f"{HERE.parent / 'launch'}:{HERE.parent}"
WORKER = "import os\nprint('first line of rank', os.environ['RANK'], flush=True)\n"
# Prints (one write, as two workers may share a pipe), and waits for its end in the first attempt.
PATIENT = """import os, time
os.write(1, f"worker {os.getpid()}\\n".encode())
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(60)
"""
LIMIT_S = 120.0


def main(argv: list[str] | None = None) -> int:
    """Prints one JSON line per number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: ends within 50 s on 2 cores")
    parser.add_argument("--torch-python", default=sys.executable, help="the Python to run both launchers in")
    args = parser.parse_args(argv)
    rounds, budget_s = (5, 6.0) if args.quick else (15, 120.0)
    has_torch = _has_torch(args.torch_python)
    if not has_torch:
        print(f"no torch in {args.torch_python}: no baseline (install the bench extra)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        script, patient = Path(folder) / "worker.py", Path(folder) / "patient.py"
        script.write_text(WORKER)
        patient.write_text(PATIENT)
        options = {"has_torch": has_torch, "rounds": rounds, "budget_s": budget_s}
        results = [_compare(nproc, args.torch_python, script, **options) for nproc in (1, 2)]
        results.append(_compare_restarts(args.torch_python, patient, **options))
        results.append(_compare_collectives(args.torch_python, **options))
        results.append(_compare_steps(Path(folder) / "programs", rounds=rounds, budget_s=budget_s))
        return emit(*results)


def _compare(
    nproc: int, python: str, script: Path, *, has_torch: bool, rounds: int, budget_s: float
) -> Result:
    count = ["--nproc-per-node", str(nproc)]
    contenders = _both(python, [*count, str(script)], first_line_s, has_torch=has_torch)
    medians = interleave(contenders, rounds=rounds, budget_s=budget_s)
    return _result(f"{nproc} worker{'s' * (nproc > 1)}", "command to first line", medians, "ratio <= 0.1667")


def _compare_restarts(python: str, script: Path, *, has_torch: bool, rounds: int, budget_s: float) -> Result:
    options = ["--nproc-per-node", "2", "--max-restarts", "1", str(script)]
    contenders = _both(python, options, restart_s, has_torch=has_torch)
    medians = interleave(contenders, rounds=rounds, budget_s=budget_s)
    return _result("2 workers", "SIGKILL of one to both running again", medians, "ratio <= 1")


def _compare_collectives(python: str, *, has_torch: bool, rounds: int, budget_s: float) -> Result:
    contenders = {
        "jaxpar-launch": lambda: restart_s(_restarting(sys.executable, "_restart_jax.py", "collective"))
    }
    if has_torch:
        torchrun = _restarting(python, "_restart_torch.py", module="torch.distributed.run")
        contenders["torchrun"] = lambda: restart_s(torchrun)
    medians = interleave(contenders, rounds=rounds, warmups=0, budget_s=budget_s)
    return _result("2 workers", "SIGKILL of one to the first collective done again", medians, None)


def _compare_steps(folder: Path, *, rounds: int, budget_s: float) -> Result:
    kept = _restarting(sys.executable, "--compilation-cache-dir", str(folder), "_restart_jax.py", "step")
    anew = _restarting(sys.executable, "_restart_jax.py", "step")
    contenders = {"kept": lambda: restart_s(kept), "anew": lambda: restart_s(anew)}
    medians = interleave(contenders, rounds=rounds, warmups=0, budget_s=budget_s)
    return Result(
        "launch",
        "2 workers, kept programs",
        "SIGKILL of one to the first step done again",
        medians["kept"] * 1e3,
        "ms",
        baseline="compiled anew",
        baseline_value=medians["anew"] * 1e3,
        target="ratio < 1",
    )


def _restarting(python: str, *arguments: str, module: str = "jaxpar_launch") -> list[str]:
    """The command that runs a script of this folder in two workers, and once more."""
    paths = [str(HERE / word) if word.endswith(".py") else word for word in arguments]
    return [python, "-m", module, "--nproc-per-node", "2", "--max-restarts", "1", *paths]


def _both(
    python: str, options: list[str], measure: Callable[[list[str]], float], *, has_torch: bool
) -> dict[str, Callable[[], float]]:
    modules = {"jaxpar-launch": "jaxpar_launch"} | (
        {"torchrun": "torch.distributed.run"} if has_torch else {}
    )
    return {
        name: lambda module=module: measure([python, "-m", module, *options])
        for name, module in modules.items()
    }


def _result(config: str, metric: str, medians: dict[str, float], target: str | None) -> Result:
    return Result(
        "launch",
        config,
        metric,
        medians["jaxpar-launch"] * 1e3,
        "ms",
        baseline="torchrun",
        baseline_value=medians["torchrun"] * 1e3 if "torchrun" in medians else None,
        target=target,
    )


def first_line_s(command: list[str]) -> float:
    """Seconds from starting `command` to the first line that a worker prints."""
    start = time.perf_counter()
    with _started(command) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        elapsed_s = time.perf_counter() - start
        _, errors = process.communicate(timeout=LIMIT_S)
    if "first line of rank" not in line or process.returncode != 0:
        raise RuntimeError(f"{command} failed: {line}{errors}")
    return elapsed_s


def restart_s(command: list[str]) -> float:
    """Seconds from the SIGKILL of a worker to the last line of two that started in its place."""
    with _started(command) as process:
        assert process.stdout is not None and process.stderr is not None
        first = _two_workers(process.stdout)
        start = time.perf_counter()
        try:
            os.kill(first[0], signal.SIGKILL)
        except ProcessLookupError:  # the launcher's first round failed by itself
            process.terminate()
            raise RuntimeError(f"{command}: workers {first} ended: {process.stderr.read()}") from None
        again = _two_workers(process.stdout)
        elapsed_s = time.perf_counter() - start
        _, errors = process.communicate(timeout=LIMIT_S)
    if set(first) & set(again) or process.returncode != 0:
        raise RuntimeError(f"{command} failed: {first} {again} {errors}")
    return elapsed_s


def _two_workers(lines: Iterable[str]) -> list[int]:
    """The processes that print the next two lines of that kind; launchers put a prefix before them, Gloo its own between."""
    said = (line.rsplit("worker", 1)[1] for line in lines if "worker" in line)
    return [int(process) for process in itertools.islice(said, 2)]


@contextlib.contextmanager
def _started(command: list[str]) -> "Iterator[subprocess.Popen[str]]":
    environ = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": PATHS,
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        # torchrun (2.13) keeps the store of a lost round, in which workers that start again find the old round's keys.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environ, **pipes) as process:
        limit = threading.Timer(LIMIT_S, process.kill)  # its output ends then, and whoever reads it fails
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()


def _has_torch(python: str) -> bool:
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([python, "-c", find]).returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
