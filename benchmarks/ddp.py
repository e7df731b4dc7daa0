"""Data parallel: is jaxpar's step as fast as `jit` + `NamedSharding` by hand, and does its communication overlap?

    layout                            jaxpar against                                   target
    1 process x 2 devices             the hand-written step, same process              step time ratio <= 1.02
    2 processes                       the hand-written step, same processes            step time ratio <= 1.02
    2 processes                       one process on one core, half the batch          (scaling efficiency)
    2 processes                       PyTorch DDP over Gloo, same sizes                (tokens/s ratio)
    64 and 4,096 H100s, compiled      one all-reduce at the end                        >= 80 % of bytes under a matmul

The first four are medians of interleaved steps (`--quick` leaves out the third and fourth); the last needs no GPU, only `pip install 'jaxpar[aot]'`.
PyTorch comes with `pip install 'jaxpar[bench]'`. What is not installed is left out, and said on stderr.
"""

import importlib.util
import json
import statistics
import sys
from pathlib import Path

from _common import Result, emit, is_quick
from jaxpar_launch import launch

HERE = Path(__file__).resolve().parent
ALONE = "1 process, 1 core"
LAYOUTS = {ALONE: (1, 1), "1 process x 2 devices": (1, 2), "2 processes": (2, 1)}
ONE_THREAD = {"PJRT_NPROC": "1", "OMP_NUM_THREADS": "1"}


def main(argv: list[str] | None = None) -> int:
    quick = is_quick(argv, __doc__)
    rounds, repeats = (5, 1) if quick else (30, 3)
    layouts = {name: LAYOUTS[name] for name in LAYOUTS if not (quick and name == ALONE)}
    medians = measure(layouts, rounds, repeats)
    torch = None if quick else torch_step_s(rounds)
    results = list(step_results(medians, torch))
    if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda12"):
        results += overlap_results([64] if quick else [64, 4096], depth=2 if quick else 4)
    else:
        missing("the GPU compiler", "aot")
    return emit(*results)


def measure(layouts: dict[str, tuple[int, int]], rounds: int, repeats: int) -> dict[str, dict[str, float]]:
    """Median step of each contender in each layout; layouts take turns, so that a slow minute hits all of them."""
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in layouts}
    for _ in range(repeats):
        for name, (nproc, devices) in layouts.items():
            command = [
                HERE / "_ddp_jax.py",
                "steps",
                "--rounds",
                str(rounds),
                "--ranks",
                str(nproc * devices),
            ]
            environ = {"PJRT_NPROC": "2"} if devices == 2 else ONE_THREAD
            result = launch(
                command, nproc=nproc, devices_per_proc=devices, environ=environ, timeout_s=600
            ).check()
            for contender, step_s in last_json(result.output[0]).items():
                samples[name].setdefault(contender, []).append(step_s)
    return {name: {c: statistics.median(v) for c, v in by.items()} for name, by in samples.items()}


def torch_step_s(rounds: int) -> float | None:
    if importlib.util.find_spec("torch") is None:
        return missing("PyTorch", "bench")
    command = [HERE / "_ddp_torch.py", "--rounds", str(rounds)]
    return last_json(launch(command, nproc=2, environ=ONE_THREAD, timeout_s=600).check().output[0])["torch"]


def step_results(medians: dict[str, dict[str, float]], torch: float | None):
    for layout in ("1 process x 2 devices", "2 processes"):
        ours, by_hand = medians[layout]["jaxpar"], medians[layout]["by hand"]
        yield Result(
            "ddp", layout, "step", ours * 1e3, "ms", "by hand", by_hand * 1e3, target="ratio <= 1.02"
        )
        if ALONE not in medians:
            continue
        # One core does one rank's share of the batch: two ranks on two cores would ideally take as long.
        alone = medians[ALONE]["jaxpar"]
        yield Result("ddp", layout, "scaling efficiency", alone / ours, "of 1", "one core alone", 1.0)
    if torch is not None:
        ours = medians["2 processes"]["jaxpar"]
        yield Result("ddp", "2 processes", "step", ours * 1e3, "ms", "PyTorch DDP, Gloo", torch * 1e3)


def overlap_results(num_devices: list[int], *, depth: int):
    for num in num_devices:
        command = [HERE / "_ddp_jax.py", "overlap", "--ranks", str(num), "--depth", str(depth)]
        result = launch(command, timeout_s=600).check()
        share = last_json(result.output[0])
        yield Result(
            "ddp",
            f"{num:,} H100s, compiled ahead of time",
            "gradient bytes under a matmul",
            share["buckets"],
            "of 1",
            "one all-reduce at the end",
            round(share["one bucket"], 4),  # the loss alone: four bytes
            target="value >= 0.8",
        )


def last_json(output: str) -> dict:
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])


def missing(what: str, extra: str) -> None:
    print(
        f"ddp: {what} is not installed; its rows are left out. pip install 'jaxpar[{extra}]'", file=sys.stderr
    )


if __name__ == "__main__":
    raise SystemExit(main())
