"""Time from a worker's death to the next training step of all: replaced in place, against a restart of all.

    t0  SIGKILL of one of two workers that train
    t1  both have done a step again: the survivor in its process, or both in new ones

Both with compiled programs kept in a folder and without. Information, without a target: of two workers, either way one has to
start Python and JAX, and that is most of the time. What a restart adds for real jobs, the starts of all other workers of a
host, reading a checkpoint and the steps since it, is not in the numbers: it starts from nothing here.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from _common import Result, emit, interleave, is_quick

HERE = Path(__file__).resolve().parent
LIMIT_S = 180.0
_LEAST_TRAINING_S = 1.0
_BUDGET_S = 240.0


def main(argv: list[str] | None = None) -> int:
    """Prints one JSON line for kept programs, and a thorough run one without."""
    quick = is_quick(argv, __doc__)
    rounds = 2 if quick else 7
    with tempfile.TemporaryDirectory() as folder:
        results = [_compare("kept programs", ["--compilation-cache-dir", folder], rounds=rounds)]
    return emit(*results, *([] if quick else [_compare("compiled anew", [], rounds=rounds)]))


def _compare(config: str, options: list[str], *, rounds: int) -> Result:
    contenders = {
        how: lambda how=how: recovery_s(["--recover", how, *options]) for how in ("in-place", "restart")
    }
    medians = interleave(contenders, rounds=rounds, warmups=1, budget_s=_BUDGET_S)
    return Result(
        "recovery",
        f"2 workers, {config}",
        "SIGKILL of one to the next step of both",
        medians["in-place"] * 1e3,
        "ms",
        baseline="restart of all",
        baseline_value=medians["restart"] * 1e3,
    )


def recovery_s(options: list[str]) -> float:
    """Seconds from the SIGKILL of a worker to the later of both workers' next step."""
    fixed = ["--nproc-per-node", "2", "--max-restarts", "1", str(HERE / "_recovery_jax.py")]
    command = [sys.executable, "-m", "jaxpar_launch", *options, *fixed]
    environ = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{HERE.parent / 'launch'}:{HERE.parent}",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environ, **pipes) as process:
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            assert process.stdout is not None
            before = _two_workers(process.stdout)
            time.sleep(_LEAST_TRAINING_S)
            start = time.perf_counter()
            os.kill(before[1], signal.SIGKILL)
            after = _two_workers(process.stdout)
            elapsed_s = time.perf_counter() - start
            _, errors = process.communicate(timeout=LIMIT_S)
        finally:
            limit.cancel()
    survivors = len(set(before) & set(after))
    if process.returncode != 0 or survivors != ("in-place" in options):
        raise RuntimeError(f"{command} failed: {before} {after} {errors}")
    return elapsed_s


def _two_workers(lines: Iterable[str]) -> list[int]:
    """The processes that say they have done a step, by rank."""
    found: dict[int, int] = {}
    for line in lines:
        if said := re.search(r"\[rank (\d)\] .*?worker (\d+) from", line):
            found[int(said[1])] = int(said[2])
            if len(found) == 2:
                break
    return [found[rank] for rank in sorted(found)]


if __name__ == "__main__":
    raise SystemExit(main())
