"""Fully sharded: is jaxpar's step as fast as parameters sharded by hand, and does its communication overlap?

    layout                            jaxpar against                                   target
    1 process x 2 devices             the hand-written step, same process              step time ratio <= 1.05
    2 processes                       the hand-written step, same processes            step time ratio <= 1.05
    2 processes                       the hand-written program                         (collectives, bytes sent, memory)
    2 processes                       PyTorch FSDP2 over Gloo, same sizes              (tokens/s ratio, memory)
    both                              the best of five flatten_below_bytes             (step time ratio)
    64 and 4,096 H100s, compiled      the hand-written program                         >= 90 % of bytes under a matmul

By hand means: parameters and optimizer state placed on the same dims, `jax.jit`, and XLA's partitioner. Steps are
interleaved and given as medians; `--quick` runs the first three lines only. The last needs no GPU, only
`pip install 'jaxpar[aot]'`. PyTorch comes with `pip install 'jaxpar[bench]'`. What is not installed is left out, and
said on stderr.
"""

from collections.abc import Iterator
from typing import Any

from _common import Result, emit, is_quick, mib, program_rows
from _workers import (
    H100S,
    ONE_DEVICE_EACH,
    TOKENS_PER_STEP,
    TWO_DEVICES,
    has_gpu_compiler,
    has_torch,
    medians_of_turns,
    run_worker,
)

LAYOUTS = (TWO_DEVICES, ONE_DEVICE_EACH)
WORKER = "_fsdp_jax.py"


def main(argv: list[str] | None = None) -> int:
    quick = is_quick(argv, __doc__)
    rounds, repeats = (10, 1) if quick else (30, 3)
    names = ["jaxpar", "by hand"] if quick else ["jaxpar", "kept", "by hand"]
    measured = medians_of_turns(WORKER, "steps", rounds, *names, layouts=LAYOUTS, repeats=repeats)
    results = [*step_results(measured), *program_results(measured[ONE_DEVICE_EACH])]
    if not quick:
        results += peer_results(measured[ONE_DEVICE_EACH]["jaxpar"]["step_s"], rounds)
        results += threshold_results(rounds)
        results += gpu_results([64, 4096], depth=12) if has_gpu_compiler("fsdp") else []
    return emit(*results)


def step_results(measured: dict[str, Any]) -> Iterator[Result]:
    """Time of a step, and the tokens/s that follow."""
    for layout, contenders in measured.items():
        by_hand_s = contenders["by hand"]["step_s"]
        for suffix, ours in _ours(contenders):
            yield _result(
                layout + suffix, "step", ours["step_s"] * 1e3, "ms", by_hand_s * 1e3, target="ratio <= 1.05"
            )
        speeds = [TOKENS_PER_STEP / s for s in (contenders["jaxpar"]["step_s"], by_hand_s)]
        yield _result(layout, "throughput", speeds[0], "tokens/s", speeds[1])


def program_results(contenders: dict[str, Any]) -> Iterator[Result]:
    """What a step communicates and needs, read from the compiled programs."""
    for suffix, ours in _ours(contenders):
        yield from program_rows("fsdp", ONE_DEVICE_EACH + suffix, ours, contenders["by hand"])


def peer_results(step_s: float, rounds: int) -> Iterator[Result]:
    """Resident memory of processes that do one thing only, and PyTorch's speed."""
    rss = {
        name: run_worker(WORKER, "rss", name, 5, layout=ONE_DEVICE_EACH)["rss_bytes"]
        for name in ("jaxpar", "by hand")
    }
    yield _result(ONE_DEVICE_EACH, "resident a process", mib(rss["jaxpar"]), "MiB", mib(rss["by hand"]))
    if has_torch("fsdp"):
        torch = run_worker("_fsdp_torch.py", rounds, layout=ONE_DEVICE_EACH)
        speeds = TOKENS_PER_STEP / step_s, TOKENS_PER_STEP / torch["step_s"]
        yield _result(
            ONE_DEVICE_EACH, "throughput", speeds[0], "tokens/s", speeds[1], baseline="PyTorch FSDP2, Gloo"
        )
        resident = mib(rss["jaxpar"]), mib(torch["rss_bytes"])
        yield _result(
            ONE_DEVICE_EACH, "resident a process", resident[0], "MiB", resident[1], baseline="PyTorch FSDP2"
        )


def threshold_results(rounds: int) -> Iterator[Result]:
    """The default of `flatten_below_bytes` beside others."""
    for layout, seconds in medians_of_turns(WORKER, "thresholds", rounds, layouts=LAYOUTS, repeats=1).items():
        default = seconds.pop("default")
        for threshold, step_s in seconds.items():
            baseline = f"flatten_below_bytes={threshold}"
            yield _result(
                layout, "step, default threshold", default * 1e3, "ms", step_s * 1e3, baseline=baseline
            )


def gpu_results(num_devices: list[int], *, depth: int) -> Iterator[Result]:
    """The share of the bytes that travel while a matmul runs; what cannot is at the ends, so it grows with depth."""
    for num in num_devices:
        programs = run_worker(WORKER, "gpus", num, depth)
        ours, by_hand = programs["jaxpar"], programs["by hand"]
        config = f"{H100S.format(num)}, {depth} blocks"
        yield _result(
            config, "bytes under a matmul", ours["share"], "of 1", by_hand["share"], target="value >= 0.9"
        )
        yield _result(config, "sent", mib(ours["sent_bytes"]), "MiB a step", mib(by_hand["sent_bytes"]))
        yield _result(config, "peak", mib(ours["device_bytes"]), "MiB a device", mib(by_hand["device_bytes"]))


def _ours(contenders: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """jaxpar's contenders, and what to call their configuration."""
    for name, suffix in {"jaxpar": "", "kept": ", reshard_after_forward=False"}.items():
        if name in contenders:
            yield suffix, contenders[name]


def _result(
    config: str,
    metric: str,
    value: float,
    unit: str,
    baseline_value: float,
    *,
    baseline: str = "by hand",
    target: str | None = None,
) -> Result:
    return Result("fsdp", config, metric, value, unit, baseline, baseline_value, target)


if __name__ == "__main__":
    raise SystemExit(main())
