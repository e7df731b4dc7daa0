"""How benchmarks run their workers: layouts that take turns, one JSON object from each run, and what is not installed."""

import importlib.util
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar_launch import launch

HERE = Path(__file__).resolve().parent
ONE_DEVICE_EACH, TWO_DEVICES = "2 processes", "1 process x 2 devices"
ALONE, FOUR_DEVICES, EIGHT_DEVICES = "1 process, 1 core", "1 process x 4 devices", "1 process x 8 devices"
FOUR_PROCESSES = "4 processes"
LAYOUTS = {
    ALONE: (1, 1),
    TWO_DEVICES: (1, 2),
    FOUR_DEVICES: (1, 4),
    EIGHT_DEVICES: (1, 8),
    ONE_DEVICE_EACH: (2, 1),
    FOUR_PROCESSES: (4, 1),
}
# Of the small model: 2 ranks with 8 rows of 64 tokens.
TOKENS_PER_STEP = 2 * 8 * 64
H100S = "{:,} H100s, compiled ahead of time"
_ONE_THREAD = {"PJRT_NPROC": "1", "OMP_NUM_THREADS": "1"}


def run_worker(
    script: str,
    *arguments: object,
    layout: str = ALONE,
    limit_s: float = 600,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs a script of this folder in a layout; returns the last JSON object that rank 0 printed.

    Each device has one core: processes are held to one thread rather than pinned, which would slow Gloo down.
    """
    nproc, devices = LAYOUTS[layout]
    environ = ({"PJRT_NPROC": str(devices)} if devices > 1 else _ONE_THREAD) | dict(environ or {})
    command = [HERE / script, *(str(argument) for argument in arguments)]
    result = launch(
        command, nproc=nproc, devices_per_proc=devices, environ=environ, timeout_s=limit_s
    ).check()
    return json.loads([line for line in result.output[0].splitlines() if line.startswith("{")][-1])


def medians_of_turns(
    script: str, *arguments: object, layouts: Sequence[str], repeats: int
) -> dict[str, dict[str, Any]]:
    """What a worker reports in each layout, with every number the median of `repeats` runs.

    Layouts take turns, so that a slow minute hits all of them.
    """
    turns = [
        {layout: run_worker(script, *arguments, layout=layout) for layout in layouts} for _ in range(repeats)
    ]
    return _median(turns)


def _median(reports: Sequence[Any]) -> Any:
    if isinstance(reports[0], dict):
        return {key: _median([report[key] for report in reports]) for key in reports[0]}
    return statistics.median(reports)


def has_torch(bench: str) -> bool:
    """Whether PyTorch is installed; says on stderr if not."""
    return _is_installed("torch") or _missing(bench, "PyTorch", "bench")


def has_gpu_compiler(bench: str) -> bool:
    """Whether XLA's GPU compiler is installed; says on stderr if not."""
    installed = _is_installed("jax_plugins") and _is_installed("jax_plugins.xla_cuda12")
    return installed or _missing(bench, "the GPU compiler", "aot")


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _missing(bench: str, what: str, extra: str) -> bool:
    print(
        f"{bench}: {what} is not installed; its rows are left out. pip install 'jaxpar[{extra}]'",
        file=sys.stderr,
    )
    return False
