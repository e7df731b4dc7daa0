"""Pipeline: what does running a schedule cost, apart from the computing and from the bubble?

    2 devices on one core in all    GPipe, 1F1B, ZB-H1, 8 and 16 microbatches      step / the same on one device
                                    1F1B of a model with nothing to compute        microseconds an action

With one core for both devices a bubble costs nothing (the other device computes), so what is more than the step of one
device is cutting, copying and dispatching. XLA:CPU lets one device use every core there is: a comparison with the simulated
makespan needs processes, one core each. Steps are interleaved and given as medians. `--quick` runs 8 microbatches only, in
fewer rounds.
"""

from collections.abc import Iterator
from typing import Any

from _common import Result, emit, is_quick
from _workers import TWO_DEVICES, run_worker

WORKER = "_pipeline_jax.py"
ONE_CORE = {"PJRT_NPROC": "1", "OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
LAYOUT = "2 devices on one core"


def main(argv: list[str] | None = None) -> int:
    """Prints one JSON line per number."""
    quick = is_quick(argv, __doc__)
    results = []
    for m in (8,) if quick else (8, 16):
        report = run_worker(WORKER, 3 if quick else 15, m, layout=TWO_DEVICES, environ=ONE_CORE)
        results += list(rows(report, m))
    return emit(*results)


def rows(report: dict[str, Any], m: int) -> Iterator[Result]:
    """What one run of the worker says."""
    one_device_ms = report["one_device_s"] * 1e3
    for name, step_s in report["step_s"].items():
        config = f"{LAYOUT}, {name}, {m} microbatches"
        yield Result("pipeline", config, "step", step_s * 1e3, "ms", "one device", one_device_ms)
    config = f"{LAYOUT}, 1F1B, {m} microbatches, nothing to compute"
    yield Result("pipeline", config, "an action", report["action_us"], "us")


if __name__ == "__main__":
    raise SystemExit(main())
