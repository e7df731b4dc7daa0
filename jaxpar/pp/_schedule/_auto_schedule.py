"""Search for the fastest schedule under given costs and memory: greedy ones under many policies, and all named ones.

    costs, memory limit  ->  candidates  ->  simulate each  ->  the shortest that fits

The named schedules are candidates too, so the result is never worse than the best of them that fits.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._builders._builder import Builder, Shape
from jaxpar.pp._schedule._costs import Costs
from jaxpar.pp._schedule._get_schedule import BUILDERS, get_schedule
from jaxpar.pp._schedule._greedy import Policy, Problem, greedy_rows
from jaxpar.pp._schedule._passes._bubbles import with_bubbles
from jaxpar.pp._schedule._placement import loop, v_shape
from jaxpar.pp._schedule._schedule import Schedule
from jaxpar.pp._schedule._simulate import simulate

POLICIES = (
    *(
        Policy(lead, fill=fill, splits=splits, goes_deep=deep)
        for lead, (splits, fill), deep in itertools.product(
            (1.0, 1.5, 2.0, math.inf),
            ((True, 0.0), (True, 0.5), (True, 1.0), (False, 1.0)),
            (False, True),
        )
    ),
    # Where memory is short: a backward first frees it.
    *(Policy(1.0, fill=f, splits=True, goes_deep=False, prefers_backward=True) for f in (0.0, 0.5, 1.0)),
)
_FEW_ACTIONS = 1500  # up to here every policy is tried on the whole problem
_NUM_FINALISTS = 4


def auto_schedule(
    n_ranks: int,
    n_microbatches: int,
    costs: Costs,
    memory_limit: float | Sequence[float] | None = None,
    *,
    stages_per_rank: int = 1,
    rank_of_stage: Sequence[int] | None = None,
) -> Schedule:
    """The fastest schedule found for these costs; never slower than a named one that fits the memory.

    Each rank takes at every moment what a policy prefers: forwards up to a limit, then backwards and forwards, weight
    gradients into gaps or when memory is short. Policies differ in the limit, in how eagerly gaps are filled, in
    whether the backward is split; all are tried, large problems first on fewer microbatches. Source: the heuristic of
    Qi et al. 2024, arXiv 2401.10241, section 3.1, extended to several stages per rank.

    Args:
        n_ranks: Ranks of the pipeline.
        n_microbatches: Microbatches of one step.
        costs: Measured or supposed durations, link, and memory of an activation.
        memory_limit: What a rank (one number), or each rank, may hold, in the unit of `costs.activation`; None for
            no limit.
        stages_per_rank: Stages on each rank; with 2 or more both the loop and the V are tried.
        rank_of_stage: Where the stages lie, if that is settled; it replaces `stages_per_rank`.

    Raises:
        ScheduleError: Law memory: a rank cannot hold one activation of each of its stages. Law definition: a number
            below 1, a table of another length, costs for another number of stages.

    Example:
        >>> from jaxpar.pp import Costs, auto_schedule, simulate
        >>> costs = Costs(F=1, I=1, W=1)
        >>> [simulate(auto_schedule(4, 8, costs, limit), costs).makespan for limit in (2, 4)]
        [41.0, 27.0]
    """
    for what, number in (
        ("n_ranks", n_ranks),
        ("n_microbatches", n_microbatches),
        ("stages_per_rank", stages_per_rank),
    ):
        if number < 1:
            raise _wrong("definition", f"{what}={number} must be at least 1")
    limits = _limits(memory_limit, n_ranks)
    best: tuple[float, float, Schedule] | None = None
    for placement in _placements(n_ranks, stages_per_rank, rank_of_stage):
        costs.check_stages(len(placement))
        problem = Problem(placement, n_microbatches, costs, limits)
        _check_one_fits(problem)
        for schedule in itertools.chain(_named(problem), _greedy(problem)):
            timeline = simulate(schedule, costs)
            if all(peak <= limit * (1 + 1e-9) for peak, limit in zip(timeline.peak, limits, strict=True)):
                found = timeline.makespan, max(timeline.peak), schedule
                if best is None or found[:2] < best[:2]:
                    best = found
    assert best is not None, "one microbatch after the other always fits"
    return with_bubbles(best[2])


def _named(problem: Problem) -> Iterator[Schedule]:
    """The named schedules that are defined for these numbers and this placement."""
    n_stages = len(problem.rank_of_stage)
    v, rest = divmod(n_stages, problem.n_ranks)
    if rest or v == 0:
        return
    shape = Shape(problem.n_ranks, problem.n_microbatches, v)
    for builder in BUILDERS:
        if _is_defined(builder, shape) and builder.place(problem.n_ranks, v) == problem.rank_of_stage:
            schedule = get_schedule(builder.name, problem.n_ranks, problem.n_microbatches, stages_per_rank=v)
            if not schedule.is_forward_only:
                yield schedule


def _is_defined(builder: Builder, shape: Shape) -> bool:
    return builder.stages_per_rank in (None, shape.stages_per_rank) and builder.is_defined(shape)


def _greedy(problem: Problem) -> Iterator[Schedule]:
    """What the policies make; of a large problem only what the best policies make, judged on fewer microbatches."""
    n_stages = len(problem.rank_of_stage)
    policies = [policy for policy in POLICIES if n_stages > problem.n_ranks or not policy.goes_deep]
    enough = max(2 * n_stages, _FEW_ACTIONS // (3 * n_stages))
    if problem.n_microbatches > enough:
        fewer = Problem(problem.rank_of_stage, enough, problem.costs, problem.memory_limit)
        judged = [(_makespan(fewer, policy), i) for i, policy in enumerate(policies)]
        policies = [policies[i] for makespan, i in sorted(judged)[:_NUM_FINALISTS] if makespan < math.inf]
    for policy in policies:
        if (schedule := _made(problem, policy)) is not None:
            yield schedule


def _makespan(problem: Problem, policy: Policy) -> float:
    schedule = _made(problem, policy)
    return math.inf if schedule is None else simulate(schedule, problem.costs).makespan


def _made(problem: Problem, policy: Policy) -> Schedule | None:
    """The policy's schedule; None if it ran itself out of memory before the end."""
    rows = greedy_rows(problem, policy)
    num_wanted = len(problem.rank_of_stage) * problem.n_microbatches * (3 if policy.splits else 2)
    return Schedule(rows, problem.rank_of_stage) if sum(map(len, rows)) == num_wanted else None


def _placements(
    n_ranks: int, stages_per_rank: int, rank_of_stage: Sequence[int] | None
) -> tuple[tuple[int, ...], ...]:
    if rank_of_stage is None:
        return tuple(dict.fromkeys((loop(n_ranks, stages_per_rank), v_shape(n_ranks, stages_per_rank))))
    if set(rank_of_stage) != set(range(n_ranks)):
        raise _wrong(
            "definition",
            f"rank_of_stage={tuple(rank_of_stage)} must name each rank 0 to {n_ranks - 1} at least once, and no other",
        )
    return (tuple(rank_of_stage),)


def _limits(memory_limit: float | Sequence[float] | None, n_ranks: int) -> tuple[float, ...]:
    if memory_limit is None:
        return (math.inf,) * n_ranks
    if isinstance(memory_limit, int | float):
        return (float(memory_limit),) * n_ranks
    if len(memory_limit) != n_ranks:
        raise _wrong(
            "definition",
            f"memory_limit has {len(memory_limit)} numbers for {n_ranks} ranks: give one, or one each",
        )
    return tuple(map(float, memory_limit))


def _check_one_fits(problem: Problem) -> None:
    for rank, limit in enumerate(problem.memory_limit):
        stages = [stage for stage, owner in enumerate(problem.rank_of_stage) if owner == rank]
        least = sum(problem.costs.memory(stage)[0] for stage in stages)
        if least > limit * (1 + 1e-9):
            raise _wrong(
                "memory",
                f"rank {rank} holds stages {stages}; one microbatch needs {least:g} there, memory_limit is {limit:g}. "
                f"Write memory_limit={least:g} or more, or make microbatches smaller",
            )


def _wrong(law: str, why: str) -> ScheduleError:
    return ScheduleError(f"auto_schedule: {why}.", law=law)
