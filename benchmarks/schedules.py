"""Pipeline schedules: how long do the largest take to prove and to simulate, and what does the search gain?

    64 ranks x 1,024 microbatches x 2 stages (400,000 actions)      build and prove <= 10 s, simulate <= 10 s
    8 ranks x 32 microbatches, costs drawn at random                 makespan of auto_schedule / best named that fits

The second is the median over draws, under the memory of 1F1B (8 activations) and under half of it, where no named
schedule fits: there the baseline is the best named one in twice the memory. Pure Python on one core;
`--quick` makes a quarter of the microbatches and fewer draws.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from _common import Result, emit, is_quick
from jaxpar.pp import Costs, auto_schedule, get_schedule, schedule_names, simulate

RANKS, MICROBATCHES = 64, 1024
NAMES = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def main(argv: list[str] | None = None) -> int:
    """Prints one JSON line per number."""
    quick = is_quick(argv, __doc__)
    microbatches, draws = (MICROBATCHES // 4, 3) if quick else (MICROBATCHES, 20)
    return emit(*time_results(microbatches), *search_results(draws))


def time_results(microbatches: int) -> Iterator[Result]:
    """Seconds to build (which proves all laws) and to simulate the largest."""
    for name in NAMES:
        config = f"{name}, {RANKS} ranks x {microbatches:,} microbatches x 2 stages"
        schedule, build_s = timed(
            lambda name=name: get_schedule(name, RANKS, microbatches, stages_per_rank=2)
        )
        _, simulate_s = timed(lambda schedule=schedule: simulate(schedule))
        yield Result("schedules", config, "build and prove", build_s, "s", target="value <= 10")
        yield Result("schedules", config, "simulate", simulate_s, "s", target="value <= 10")


def search_results(draws: int) -> Iterator[Result]:
    """What the search gains over the best named schedule."""
    for limit, named_limit in ((8, 8), (4, 8)):
        ours, named, seconds = zip(
            *(one_draw(seed, limit, named_limit) for seed in range(draws)), strict=True
        )
        ratios = [mine / best for mine, best in zip(ours, named, strict=True)]
        config = f"8 ranks x 32 microbatches, {limit} activations a rank"
        best = f"best named in {named_limit}"
        target = "ratio <= 1" if limit == named_limit else None
        yield Result("schedules", config, "makespan", statistics.median(ratios), "of 1", best, 1.0, target)
        yield Result("schedules", config, "search", statistics.median(seconds), "s")


def one_draw(seed: int, limit: float, named_limit: float) -> tuple[float, float, float]:
    """Makespan of the search and of the best named schedule, and the seconds that the search took."""
    rng = random.Random(seed)
    costs = Costs(
        F=rng.uniform(0.8, 1.2),
        I=rng.uniform(0.8, 1.4),
        W=rng.uniform(0.6, 1.2),
        latency=rng.uniform(0.0, 0.2),
    )
    schedule, seconds = timed(lambda: auto_schedule(8, 32, costs, limit))
    named = [simulate(get_schedule(name, 8, 32, stages_per_rank=1), costs) for name in names()]
    best = min(timeline.makespan for timeline in named if max(timeline.peak) <= named_limit)
    return simulate(schedule, costs).makespan, best, seconds


def names() -> list[str]:
    """Schedules with one stage per rank and a backward."""
    return [name for name in schedule_names(stages_per_rank=1) if name not in ("ForwardOnly",)]


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `action`, and the processor seconds it took: this is one thread, whatever else runs."""
    start_s = time.process_time()
    result = action()
    return result, time.process_time() - start_s


if __name__ == "__main__":
    raise SystemExit(main())
