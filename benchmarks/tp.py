"""Tensor parallel: is jaxpar's step as fast as sharding annotations under `jit`, and what does a long sequence need?

    layout                            jaxpar against                                   target
    1 process x 2 devices             the annotated step, same process                 step time ratio <= 1.05
    2 processes                       the annotated step, same processes               step time ratio <= 1.05
    2 devices                         the annotated program                            (collectives, bytes sent, memory)
    2 processes                       PyTorch TP over Gloo, same sizes                 (tokens/s ratio, memory)
    1 to 8 devices, compiled          dense attention on one device, 131,072 tokens    memory ratio <= 0.001 / devices

All but the last without and with sequence parallelism (PyTorch without). Annotated means: the same parameters on the same
dims, the residual stream and the inputs of attention and MLP constrained, `jax.jit`, and XLA's partitioner. Steps are
interleaved and given as medians. The last is ring attention with its backward: no scores, and 1/c of everything else, but
for what travels. `--quick` runs sequence parallelism in the first layout and none in the second, and no PyTorch. That comes
with `pip install 'jaxpar[bench]'`; where it is not installed it is left out, and said on stderr.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from _common import Result, emit, is_quick, mib, program_rows
from _workers import (
    EIGHT_DEVICES,
    ONE_DEVICE_EACH,
    TOKENS_PER_STEP,
    TWO_DEVICES,
    has_torch,
    medians_of_turns,
    run_worker,
)

LAYOUTS = (TWO_DEVICES, ONE_DEVICE_EACH)
WORKER = "_tp_jax.py"
MODES = {"tensor": "", "sequence": ", sequence parallel"}
LENGTH = 131_072
# Of dense attention's temporaries, times the number of devices.
RING_SHARE = 0.001


def main(argv: list[str] | None = None) -> int:
    quick = is_quick(argv, __doc__)
    rounds, repeats = (6, 1) if quick else (30, 3)
    modes = (
        {TWO_DEVICES: ["sequence"], ONE_DEVICE_EACH: ["tensor"]} if quick else dict.fromkeys(LAYOUTS, MODES)
    )
    measured = {
        layout: medians_of_turns(WORKER, "steps", rounds, *names, layouts=[layout], repeats=repeats)[layout]
        for layout, names in modes.items()
    }
    results = [*step_results(measured), *program_results(measured)]
    if not quick:
        results += peer_results(measured[ONE_DEVICE_EACH]["tensor"]["jaxpar"]["step_s"], rounds)
    results += attention_results([1, 8] if quick else [1, 2, 4, 8])
    return emit(*results)


def step_results(measured: dict[str, Any]) -> Iterator[Result]:
    """Time of a step, and the tokens/s that follow."""
    for layout, modes in measured.items():
        for mode, contenders in modes.items():
            config = layout + MODES[mode]
            ours_s, by_hand_s = contenders["jaxpar"]["step_s"], contenders["by hand"]["step_s"]
            yield _result(config, "step", ours_s * 1e3, "ms", by_hand_s * 1e3, target="ratio <= 1.05")
            speeds = TOKENS_PER_STEP / ours_s, TOKENS_PER_STEP / by_hand_s
            yield _result(config, "throughput", speeds[0], "tokens/s", speeds[1])


def program_results(measured: dict[str, Any]) -> Iterator[Result]:
    """What a step communicates and needs, read from the compiled programs: the same in both layouts."""
    by_mode = {mode: contenders for modes in measured.values() for mode, contenders in modes.items()}
    for mode, contenders in by_mode.items():
        yield from program_rows("tp", "2 devices" + MODES[mode], contenders["jaxpar"], contenders["by hand"])


def peer_results(step_s: float, rounds: int) -> Iterator[Result]:
    """Resident memory of processes that do one thing only, and PyTorch's speed."""
    rss = {
        name: run_worker(WORKER, "rss", name, "tensor", 5, layout=ONE_DEVICE_EACH)["rss_bytes"]
        for name in ("jaxpar", "by hand")
    }
    ours = mib(rss["jaxpar"])
    yield _result(ONE_DEVICE_EACH, "resident a process", ours, "MiB", mib(rss["by hand"]))
    if has_torch("tp"):
        torch = run_worker("_tp_torch.py", rounds, layout=ONE_DEVICE_EACH)
        speeds = TOKENS_PER_STEP / step_s, TOKENS_PER_STEP / torch["step_s"]
        yield _result(
            ONE_DEVICE_EACH, "throughput", speeds[0], "tokens/s", speeds[1], baseline="PyTorch TP, Gloo"
        )
        resident = mib(torch["rss_bytes"])
        yield _result(ONE_DEVICE_EACH, "resident a process", ours, "MiB", resident, baseline="PyTorch TP")


def attention_results(num_devices: Sequence[int]) -> Iterator[Result]:
    """Temporaries of causal attention, forward and backward: a device of the ring against one device with the scores."""
    temporaries = run_worker(WORKER, "attention", LENGTH, *num_devices, layout=EIGHT_DEVICES)
    dense = mib(temporaries["dense"])
    for devices in num_devices:
        yield _result(
            f"ring attention, {LENGTH:,} tokens over {devices} device{'s' * (devices > 1)}",
            "temporaries",
            mib(temporaries[str(devices)]),
            "MiB a device",
            dense,
            baseline="dense, 1 device",
            target=f"ratio <= {RING_SHARE / devices:g}",
        )


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
    return Result("tp", config, metric, value, unit, baseline, baseline_value, target)


if __name__ == "__main__":
    raise SystemExit(main())
