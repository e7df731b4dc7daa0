"""Pipeline: what does running a schedule cost, apart from the computing and from the bubble?

    2 devices on one core in all    GPipe, 1F1B, ZB-H1, 8 and 16 microbatches      step / the same on one device
                                    1F1B of a model with nothing to compute        microseconds an action
    2 processes, one core each      GPipe, 1F1B, ZB-H1                              step / simulated with measured costs <= 1.05
                                    the same, messages by ppermute                  step / pulled
                                    GPipe, 1F1B                                     step / PyTorch's pipelining over Gloo
                                    1F1B                                            step / fully_shard over the same devices
                                    1F1B                                            step / half of one device's: 1 is ideal

With one core for both devices a bubble costs nothing (the other device computes), so what is more than the step of one
device is cutting, copying and dispatching. XLA:CPU lets one device use every core there is: a comparison with the simulated
makespan needs processes, one core each. Steps are interleaved and given as medians. `--quick` runs 8 microbatches only, in
fewer rounds, in one process.
"""

from collections.abc import Iterator
from typing import Any

from _common import Result, emit, is_quick
from _workers import ONE_DEVICE_EACH, TWO_DEVICES, has_torch, run_worker

WORKER, PROCESSES_WORKER = "_pipeline_jax.py", "_pipeline_processes.py"
ONE_CORE = {"PJRT_NPROC": "1", "OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
LAYOUT = "2 devices on one core"


def main(argv: list[str] | None = None) -> int:
    """Prints one JSON line per number."""
    quick = is_quick(argv, __doc__)
    results = []
    for m in (8,) if quick else (8, 16):
        report = run_worker(WORKER, 3 if quick else 15, m, layout=TWO_DEVICES, environ=ONE_CORE)
        results += list(rows(report, m))
        results += [] if quick else list(process_rows(15, m))
    return emit(*results)


def rows(report: dict[str, Any], m: int) -> Iterator[Result]:
    """What one run of the worker says."""
    one_device_ms = report["one_device_s"] * 1e3
    for name, step_s in report["step_s"].items():
        config = f"{LAYOUT}, {name}, {m} microbatches"
        yield Result("pipeline", config, "step", step_s * 1e3, "ms", "one device", one_device_ms)
    config = f"{LAYOUT}, 1F1B, {m} microbatches, nothing to compute"
    yield Result("pipeline", config, "an action", report["action_us"], "us")


def process_rows(rounds: int, m: int) -> Iterator[Result]:
    """Steps of a stage in each of two processes."""
    one_device_ms = run_worker(PROCESSES_WORKER, rounds, m)["one_device_s"] * 1e3
    report = run_worker(PROCESSES_WORKER, rounds, m, layout=ONE_DEVICE_EACH)
    torch = (
        run_worker("_pipeline_torch.py", rounds, m, layout=ONE_DEVICE_EACH) if has_torch("pipeline") else {}
    )
    for name, step_s in report["step_s"]["pull"].items():
        config, ms = f"{ONE_DEVICE_EACH}, {name}, {m} microbatches", step_s * 1e3
        simulated_ms = report["simulated_s"][name] * 1e3
        yield Result("pipeline", config, "step", ms, "ms", "simulated", simulated_ms, "ratio <= 1.05")
        permuted_ms = report["step_s"]["permute"][name] * 1e3
        yield Result("pipeline", f"{config}, by ppermute", "step", permuted_ms, "ms", "pulled", ms)
        if name in torch:
            yield Result("pipeline", config, "step", ms, "ms", "PyTorch, Gloo", torch[name] * 1e3)
        yield Result("pipeline", config, "step", ms, "ms", "half of one device's", one_device_ms / 2)
        yield Result("pipeline", config, "step", ms, "ms", "fully_shard", report["fsdp_s"] * 1e3)


if __name__ == "__main__":
    raise SystemExit(main())
