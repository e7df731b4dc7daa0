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

from collections.abc import Iterator

from _common import Result, emit, is_quick
from _workers import (
    ALONE,
    H100S,
    ONE_DEVICE_EACH,
    TWO_DEVICES,
    has_gpu_compiler,
    has_torch,
    medians_of_turns,
    run_worker,
)


def main(argv: list[str] | None = None) -> int:
    quick = is_quick(argv, __doc__)
    rounds, repeats = (5, 1) if quick else (30, 3)
    layouts = [TWO_DEVICES, ONE_DEVICE_EACH] + ([] if quick else [ALONE])
    results = [
        *step_results(
            medians_of_turns("_ddp_jax.py", "steps", rounds, layouts=layouts, repeats=repeats), rounds
        )
    ]
    if has_gpu_compiler("ddp"):
        results += overlap_results([64] if quick else [64, 4096], depth=2 if quick else 4)
    return emit(*results)


def step_results(medians: dict[str, dict[str, float]], rounds: int) -> Iterator[Result]:
    for layout in (TWO_DEVICES, ONE_DEVICE_EACH):
        ours, by_hand = medians[layout]["jaxpar"], medians[layout]["by hand"]
        yield Result(
            "ddp", layout, "step", ours * 1e3, "ms", "by hand", by_hand * 1e3, target="ratio <= 1.02"
        )
        if ALONE not in medians:
            continue
        # One core does one rank's share of the batch: two ranks on two cores would ideally take as long.
        alone = medians[ALONE]["jaxpar"]
        yield Result("ddp", layout, "scaling efficiency", alone / ours, "of 1", "one core alone", 1.0)
    if ALONE in medians and has_torch("ddp"):
        ours = medians[ONE_DEVICE_EACH]["jaxpar"]
        torch = run_worker("_ddp_torch.py", rounds, layout=ONE_DEVICE_EACH)["step_s"]
        yield Result("ddp", ONE_DEVICE_EACH, "step", ours * 1e3, "ms", "PyTorch DDP, Gloo", torch * 1e3)


def overlap_results(num_devices: list[int], *, depth: int) -> Iterator[Result]:
    for num in num_devices:
        share = run_worker("_ddp_jax.py", "overlap", num, depth)
        yield Result(
            "ddp",
            H100S.format(num),
            "gradient bytes under a matmul",
            share["buckets"],
            "of 1",
            "one all-reduce at the end",
            round(share["one bucket"], 4),  # the loss alone: four bytes
            target="value >= 0.8",
        )


if __name__ == "__main__":
    raise SystemExit(main())
