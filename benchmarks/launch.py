"""Time from the command to a worker's first line: `jaxpar-launch` against torchrun, interleaved.

    t0  exec of `python -m jaxpar_launch ...` or `python -m torch.distributed.run ...`
    t1  the first line of a worker that only prints arrives here

Both run in the same Python, so that both pay the same interpreter start: this one if it has torch (the
`bench` extra), else the one given by `--torch-python`. Without torch the time is printed without baseline.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import Result, emit, interleave

LAUNCH_FOLDER = Path(__file__).resolve().parents[1] / "launch"
WORKER = "import os\nprint('first line of rank', os.environ['RANK'], flush=True)\n"
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
        script = Path(folder) / "worker.py"
        script.write_text(WORKER)
        return max(
            _compare(nproc, args.torch_python, script, has_torch=has_torch, rounds=rounds, budget_s=budget_s)
            for nproc in (1, 2)
        )


def _compare(nproc: int, python: str, script: Path, *, has_torch: bool, rounds: int, budget_s: float) -> int:
    count = ["--nproc-per-node", str(nproc)]
    contenders = {"jaxpar-launch": lambda: first_line_s([python, "-m", "jaxpar_launch", *count, str(script)])}
    if has_torch:
        torchrun = [python, "-m", "torch.distributed.run", *count, str(script)]
        contenders["torchrun"] = lambda: first_line_s(torchrun)
    medians = interleave(contenders, rounds=rounds, budget_s=budget_s)
    return emit(
        Result(
            "launch",
            f"{nproc} worker{'s' * (nproc > 1)}",
            "command to first line",
            medians["jaxpar-launch"] * 1e3,
            "ms",
            baseline="torchrun",
            baseline_value=medians["torchrun"] * 1e3 if has_torch else None,
            target="ratio <= 0.1667",
        )
    )


def first_line_s(command: list[str]) -> float:
    """Seconds from starting `command` to the first line that a worker prints."""
    environ = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(LAUNCH_FOLDER),
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
    }
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        elapsed_s = time.perf_counter() - start
        _, errors = process.communicate(timeout=LIMIT_S)
    if "first line of rank" not in line or process.returncode != 0:
        raise RuntimeError(f"{command} failed: {line}{errors}")
    return elapsed_s


def _has_torch(python: str) -> bool:
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([python, "-c", find]).returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
