"""Pipeline: does a step take what the schedule's simulation says, and what does an action cost apart from computing?

    1 process x 2 devices     GPipe, 1F1B, ZB-H1, 8 and 16 microbatches     step / simulation with measured costs
                              the same step on one device                    efficiency: its time / (2 x ours)
                              1F1B of a model with nothing to compute        microseconds an action

Each device has one core. Steps are interleaved and given as medians; the costs are measured alone, right after, by
`TrainStep.measure`. `--quick` runs 8 microbatches only, in fewer rounds.
"""

from collections.abc import Iterator
from typing import Any

from _common import Result, emit, is_quick
from _workers import TWO_DEVICES, run_worker

WORKER = "_pipeline_jax.py"
ONE_CORE_A_DEVICE = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}


def main(argv: list[str] | None = None) -> int:
    """Prints one JSON line per number."""
    quick = is_quick(argv, __doc__)
    results = []
    for m in (8,) if quick else (8, 16):
        report = run_worker(WORKER, 3 if quick else 15, m, layout=TWO_DEVICES, environ=ONE_CORE_A_DEVICE)
        results += list(rows(report, m))
    return emit(*results)


def rows(report: dict[str, Any], m: int) -> Iterator[Result]:
    """What one run of the worker says."""
    for name, step_s in report["step_s"].items():
        config = f"{TWO_DEVICES}, {name}, {m} microbatches"
        simulated_ms, step_ms = report["simulated_s"][name] * 1e3, step_s * 1e3
        yield Result("pipeline", config, "step", step_ms, "ms", "simulation", simulated_ms)
        efficiency = report["one_device_s"] / (report["ranks"] * step_s)
        yield Result("pipeline", config, "efficiency", efficiency, "of 1", "one device", 1.0)
    config = f"{TWO_DEVICES}, 1F1B, {m} microbatches, nothing to compute"
    yield Result("pipeline", config, "an action", report["action_us"], "us")


if __name__ == "__main__":
    raise SystemExit(main())
