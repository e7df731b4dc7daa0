"""Pipeline schedules: how long do the largest take to prove and to simulate, and what does the search gain?

    64 ranks x 1,024 microbatches x 2 stages (400,000 actions)      build and prove <= 10 s, simulate <= 10 s
    8 ranks x 32 microbatches, costs drawn at random                 makespan of auto_schedule / best named <= 1

The second is the median over draws, in the memory of 1F1B (8 activations a rank), half as much again, and twice as much;
beside it the least makespan that any schedule can have: the work of one rank, and the skew of the last. Pure Python on one
core; `--quick` makes a quarter of the microbatches and fewer draws.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from _common import Result, emit, is_quick
from jaxpar.pp import Costs, auto_schedule, get_schedule, schedule_names, simulate

RANKS, MICROBATCHES = 64, 1024
RANKS_SEARCHED, MICROBATCHES_SEARCHED = 8, 32
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
    """What the search gains over the best named schedule, and how far it is from the least there is."""
    for limit in (RANKS_SEARCHED, RANKS_SEARCHED * 3 // 2, RANKS_SEARCHED * 2):
        ours, named, least, seconds = zip(*(one_draw(seed, limit) for seed in range(draws)), strict=True)
        config = f"{RANKS_SEARCHED} ranks x {MICROBATCHES_SEARCHED} microbatches, {limit} activations a rank"
        yield ratio(config, ours, named, baseline="best named", target="ratio <= 1")
        yield ratio(config, ours, least, baseline="lower bound", target=None)
        yield Result("schedules", config, "search", statistics.median(seconds), "s")


def ratio(
    config: str, ours: Sequence[float], theirs: Sequence[float], *, baseline: str, target: str | None
) -> Result:
    """Median of the ratios, as a result whose baseline is 1."""
    value = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
    return Result("schedules", config, "makespan", value, "of 1", baseline, 1.0, target)


def one_draw(seed: int, limit: float) -> tuple[float, float, float, float]:
    """Makespan of the search, of the best named schedule that fits, the lower bound, and seconds of search."""
    rng = random.Random(seed)
    costs = Costs(
        F=rng.uniform(0.8, 1.2),
        I=rng.uniform(0.8, 1.4),
        W=rng.uniform(0.6, 1.2),
        latency=rng.uniform(0.0, 0.2),
    )
    p, m = RANKS_SEARCHED, MICROBATCHES_SEARCHED
    schedule, seconds = timed(lambda: auto_schedule(p, m, costs, limit))
    named = [simulate(get_schedule(name, p, m, stages_per_rank=1), costs) for name in names()]
    best = min(timeline.makespan for timeline in named if max(timeline.peak) <= limit)
    least = m * (costs.F + costs.I + costs.W) + (p - 1) * (costs.F + costs.latency)
    return simulate(schedule, costs).makespan, best, least, seconds


def names() -> list[str]:
    """Schedules with one stage per rank and a backward."""
    return [name for name in schedule_names(stages_per_rank=1) if name != "ForwardOnly"]


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `action`, and the processor seconds it took: this is one thread, whatever else runs."""
    start_s = time.process_time()
    result = action()
    return result, time.process_time() - start_s


if __name__ == "__main__":
    raise SystemExit(main())
