"""All named schedules for the same ranks and microbatches, in one table and one unit.

one rank's share of the model:   |   stage   |     v = 1: F takes F, an activation weighs 1
                                 | s0  |  s1 |     v = 2: F takes F/2 on each, an activation weighs 1/2
"""

import dataclasses
from collections.abc import Iterator

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._auto_schedule import auto_schedule
from jaxpar.pp._schedule._costs import Costs, PerStage
from jaxpar.pp._schedule._get_schedule import BUILDERS, get_schedule
from jaxpar.pp._schedule._schedule import Schedule
from jaxpar.pp._schedule._simulate import simulate

_OF_A_SHARE = (
    "F", "I", "W", "B", "OVERLAP_F_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "activation", "kept_for_W"
)  # fmt: skip


_SEARCHED_STAGES = (1, 2)  # on each rank, with a memory limit


def compare(
    n_ranks: int,
    n_microbatches: int,
    costs: Costs,
    *,
    memory_limit: float | None = None,
    lockstep: bool = False,
) -> str:
    """A table of all schedules with a backward that are defined for these numbers, the fastest first.

    Args:
        n_ranks: Ranks of the pipeline.
        n_microbatches: Microbatches of one step.
        costs: Of one rank's share of the model, whatever the number of its stages.
        memory_limit: What a rank may hold; then only what fits is listed, and what `auto_schedule` finds.
        lockstep: As for `simulate`.

    Raises:
        ScheduleError: Law definition or memory: no schedule is defined for these numbers, or fits.

    Example:
        >>> print(compare(1, 1, Costs()).splitlines()[0])
        schedule               stages/rank  makespan  bubble  peak memory
    """
    found: list[tuple[str, int, Schedule]] = []
    refused: dict[str, ScheduleError] = {}
    for builder in BUILDERS:
        try:
            schedule = get_schedule(builder.name, n_ranks, n_microbatches)
        except ScheduleError as error:
            refused[builder.name] = error
            continue
        if not schedule.is_forward_only:
            found.append((builder.name, builder.usual_stages_per_rank, schedule))
    if not found:
        raise next(iter(refused.values()))
    if memory_limit is not None:
        for v in _SEARCHED_STAGES:
            searched = auto_schedule(
                n_ranks, n_microbatches, _share(costs, v), memory_limit, stages_per_rank=v
            )
            found.append(("auto_schedule", v, searched))
    lines = ["schedule               stages/rank  makespan  bubble  peak memory"]
    for makespan, peak, name, v, bubble in sorted(_measured(found, costs, lockstep=lockstep)):
        if memory_limit is None or peak <= memory_limit * (1 + 1e-9):
            lines.append(f"{name:21}  {v:11}  {makespan:8.6g}  {bubble:6.1%}  {peak:11.6g}")
    if refused:
        lines.append(f"not defined for these numbers: {', '.join(refused)}")
    return "\n".join(lines)


def _measured(
    found: list[tuple[str, int, Schedule]], costs: Costs, *, lockstep: bool
) -> Iterator[tuple[float, float, str, int, float]]:
    """Makespan, peak, name, stages per rank and mean bubble of each schedule."""
    for name, v, schedule in found:
        timeline = simulate(schedule, _share(costs, v), lockstep=lockstep)
        bubble = sum(timeline.bubble_fraction) / schedule.n_ranks
        yield timeline.makespan, max(timeline.peak), name, v, bubble


def _share(costs: Costs, stages_per_rank: int) -> Costs:
    """The costs of each of several stages into which a rank's share is cut."""

    def part(given: PerStage | None) -> PerStage | None:
        if isinstance(given, tuple):
            return tuple(number / stages_per_rank for number in given)
        return None if given is None else given / stages_per_rank

    return dataclasses.replace(costs, **{name: part(getattr(costs, name)) for name in _OF_A_SHARE})
