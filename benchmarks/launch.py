"""Time from the command to a worker's first line, and from a worker's death to all running again: against torchrun.

    t0  exec of `python -m jaxpar_launch ...` or `python -m torch.distributed.run ...`
    t1  the first line of a worker that only prints arrives here

    t0  SIGKILL of one of two workers, with --max-restarts 1
    t1  both print again

Both run in the same Python, so that both pay the same interpreter start: this one if it has torch (the
`bench` extra), else the one given by `--torch-python`. Without torch the time is printed without baseline.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _common import Result, emit, interleave

LAUNCH_FOLDER = Path(__file__).resolve().parents[1] / "launch"
WORKER = "import os\nprint('first line of rank', os.environ['RANK'], flush=True)\n"
# Prints, and waits for its end in the first attempt.
PATIENT = """import os, time
print("worker", os.getpid(), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(60)
"""
LIMIT_S = 60.0


def main(argv: list[str] | None = None) -> int:
    """Prints one JSON line per number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: ends within 50 s on 2 cores")
    parser.add_argument("--torch-python", default=sys.executable, help="the Python to run both launchers in")
    args = parser.parse_args(argv)
    rounds, budget_s = (5, 10.0) if args.quick else (15, 120.0)
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


def _result(config: str, metric: str, medians: dict[str, float], target: str) -> Result:
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
        assert process.stdout is not None
        first = [_worker(process.stdout.readline()) for _ in range(2)]
        start = time.perf_counter()
        os.kill(first[0], signal.SIGKILL)
        again = [_worker(process.stdout.readline()) for _ in range(2)]
        elapsed_s = time.perf_counter() - start
        _, errors = process.communicate(timeout=LIMIT_S)
    if set(first) & set(again) or process.returncode != 0:
        raise RuntimeError(f"{command} failed: {first} {again} {errors}")
    return elapsed_s


def _worker(line: str) -> int:
    """The process that printed a line; launchers put a prefix before it."""
    return int(line.rsplit("worker", 1)[1])


def _started(command: list[str]) -> "subprocess.Popen[str]":
    environ = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(LAUNCH_FOLDER),
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def _has_torch(python: str) -> bool:
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([python, "-c", find]).returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
