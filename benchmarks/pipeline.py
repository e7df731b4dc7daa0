"""Pipeline: what does running a schedule cost, apart from the computing and from the bubble?

    2, 4, 8 devices on one core     GPipe, 1F1B, ZB-H1                              step / the same on one device
                                    1F1B of a model with nothing to compute        microseconds an action
    2 and 4 processes               all of these, Interleaved1F1B, ZBV              step / simulated with measured costs <= 1.05
                                    8 microbatches a rank                           efficiency against one device / simulated
                                    messages by ppermute                            step / pulled
                                    GPipe, 1F1B                                     step / PyTorch's pipelining over Gloo
                                    1F1B                                            step / fully_shard over the same devices
                                    8 more microbatches                             what each adds / simulated

With one core for all devices a bubble costs nothing (another device computes), so what is more than the step of one device is
cutting, copying and dispatching. XLA:CPU lets one device use every core there is: a comparison with the simulated makespan
needs processes, one core each, and is made where there are as many cores. What a microbatch adds leaves out what a step has
beside its schedule: batch, optimizer, metrics. Steps are interleaved and given as medians. `--quick` runs 8 microbatches on
two devices only, in fewer rounds, in one process.
"""

import os
from collections.abc import Iterator
from typing import Any

from _common import Result, emit, is_quick
from _workers import (
    EIGHT_DEVICES,
    FOUR_DEVICES,
    FOUR_PROCESSES,
    LAYOUTS,
    ONE_DEVICE_EACH,
    TWO_DEVICES,
    has_torch,
    run_worker,
)

WORKER, PROCESSES_WORKER, TORCH_WORKER = "_pipeline_jax.py", "_pipeline_processes.py", "_pipeline_torch.py"
ONE_CORE = {"PJRT_NPROC": "1", "OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(argv: list[str] | None = None) -> int:
    """Prints one JSON line per number."""
    if is_quick(argv, __doc__):
        return emit(*local_rows(3, 8, TWO_DEVICES))
    results = []
    for layout, m, rounds in (
        (TWO_DEVICES, 8, 15),
        (TWO_DEVICES, 16, 9),
        (FOUR_DEVICES, 16, 5),
        (EIGHT_DEVICES, 32, 3),
    ):
        results += local_rows(rounds, m, layout)
    few, many = (measured(rounds, m, ONE_DEVICE_EACH) for rounds, m in ((9, 8), (9, 16)))
    results += [*process_rows(few), *process_rows(many), *rows_of_more(few, many)]
    results += process_rows(measured(5, 32, FOUR_PROCESSES, stages_per_rank=1))
    return emit(*results)


def local_rows(rounds: int, m: int, layout: str) -> Iterator[Result]:
    """All devices in one process, on one core."""
    num_devices = LAYOUTS[layout][1]
    report = run_worker(WORKER, rounds, m, layout=layout, environ=ONE_CORE)
    one_device_ms = report["one_device_s"] * 1e3
    config = f"{num_devices} devices on one core"
    for name, step_s in report["step_s"].items():
        yield Result(
            "pipeline",
            f"{config}, {name}, {m} microbatches",
            "step",
            step_s * 1e3,
            "ms",
            "one device",
            one_device_ms,
        )
    yield Result(
        "pipeline",
        f"{config}, 1F1B, {m} microbatches, nothing to compute",
        "an action",
        report["action_us"],
        "us",
    )


def measured(rounds: int, m: int, layout: str, *, stages_per_rank: int = 2) -> dict[str, Any]:
    """A rank in each process; the same on one device, and in PyTorch."""
    p = LAYOUTS[layout][0]
    report = run_worker(
        PROCESSES_WORKER, rounds, m, p, "--stages-per-rank", stages_per_rank, layout=layout, limit_s=1200
    )
    report |= run_worker(PROCESSES_WORKER, rounds, m, p)
    torch = run_worker(TORCH_WORKER, rounds, m, layout=layout) if has_torch("pipeline") else {}
    return report | {"torch_s": torch, "processes": p, "microbatches": m}


def process_rows(report: dict[str, Any]) -> Iterator[Result]:
    """What one layout and number of microbatches gave."""
    p, m = report["processes"], report["microbatches"]
    cores = min(p, CORES)
    where = f"{p} processes" + (f" on {cores} cores" if cores < p else "")
    ideal_ms, fsdp_ms = report["one_device_s"] * 1e3 / cores, report["fsdp_s"] * 1e3
    for name, step_s in report["pull_s"].items():
        config, ms = f"{where}, {name}, {m} microbatches", step_s * 1e3

        def step(
            of: str, other_ms: float, target: str | None = None, config: str = config, ms: float = ms
        ) -> Result:
            return Result("pipeline", config, "step", ms, "ms", of, other_ms, target)

        simulated_ms = report["simulated_s"][name] * 1e3
        if cores == p:
            yield step("simulated", simulated_ms, "ratio <= 1.05")
        if m >= 8 * p:
            baseline = ("simulated", ideal_ms / simulated_ms) if cores == p else (None, None)
            yield Result("pipeline", config, "efficiency", ideal_ms / ms, "of 1", *baseline)
        if name in report["permute_s"]:
            permuted_ms = report["permute_s"][name] * 1e3
            yield Result("pipeline", f"{config}, by ppermute", "step", permuted_ms, "ms", "pulled", ms)
        if name in report["torch_s"]:
            yield step("PyTorch, Gloo", report["torch_s"][name] * 1e3)
        yield step("fully_shard", fsdp_ms)


def rows_of_more(few: dict[str, Any], many: dict[str, Any]) -> Iterator[Result]:
    """What each microbatch adds: the schedule without what a step has beside it."""
    p, more = few["processes"], many["microbatches"] - few["microbatches"]
    for name in few["pull_s"]:
        ms = (many["pull_s"][name] - few["pull_s"][name]) * 1e3 / more
        simulated_ms = few["simulated_more_s"][name] * 1e3
        config = f"{p} processes, {name}, from {few['microbatches']} to {many['microbatches']} microbatches"
        yield Result("pipeline", config, "each more", ms, "ms", "simulated", simulated_ms)


if __name__ == "__main__":
    raise SystemExit(main())
