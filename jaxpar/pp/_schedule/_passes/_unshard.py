"""Write down when a stage's parameters are gathered and freed, with a bound on how many are whole at once.

    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1        at most 2 whole:  0UNSHARD 2UNSHARD 0F0 ... 2B1 2RESHARD 0B0 0B1 0RESHARD

Before each action the rank holds the next stages that it will use, up to the bound: the next one is gathered ahead.
"""

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._action import COMPUTE, Action, Op
from jaxpar.pp._schedule._passes._rebuilt import rebuilt
from jaxpar.pp._schedule._schedule import Schedule


def add_unshard(schedule: Schedule, *, max_active_stages: int = 3) -> Schedule:
    """Add UNSHARD and RESHARD for stages whose parameters are sharded (FSDP); source: PyTorch's unshard pass.

    UNSHARD stands for an all-gather over the FSDP axis of the stage's mesh, RESHARD moves nothing.

    Args:
        schedule: Without UNSHARD and RESHARD.
        max_active_stages: The most stages that are whole on a rank at once, at least 1 (2 where a forward and a
            backward of different stages overlap).

    Raises:
        ScheduleError: Law definition: a bound below what one action needs. Law order: the grid has UNSHARD already.

    Example:
        >>> add_unshard(Schedule([["0F0", "0B0"]])).to_csv()
        '0UNSHARD,0F0,0B0,0RESHARD\\n'
    """
    most = max(len({part.stage for part in a.parts}) for row in schedule.rows for a in row if a is not None)
    if max_active_stages < most:
        raise ScheduleError(
            f"add_unshard: max_active_stages={max_active_stages}, but one action of the schedule uses {most} "
            f"stage{'s' if most > 1 else ''} at once. Write max_active_stages={most} or more.",
            law="definition",
        )
    return rebuilt(schedule, [_with_unshard(row, max_active_stages) for row in schedule.rows])


def _with_unshard(row: tuple[Action | None, ...], bound: int) -> list[Action | None]:
    written: list[Action | None] = []
    whole: list[int] = []
    for action, upcoming in zip(row, _upcoming(row), strict=True):
        wanted = upcoming[:bound]
        for stage in [stage for stage in whole if stage not in wanted]:
            written.append(Action(stage, Op.RESHARD))
            whole.remove(stage)
        for stage in wanted:
            if stage not in whole:
                written.append(Action(stage, Op.UNSHARD))
                whole.append(stage)
        written.append(action)
    return written + [Action(stage, Op.RESHARD) for stage in whole]


def _upcoming(row: tuple[Action | None, ...]) -> list[list[int]]:
    """For every step the stages that are computed from there on, the soonest first."""
    following: list[list[int]] = []
    stages: list[int] = []
    for action in reversed(row):
        if action is not None and action.parts[0].op in COMPUTE:
            used = list(dict.fromkeys(part.stage for part in action.parts))
            stages = used + [stage for stage in stages if stage not in used]
        following.append(stages)
    return following[::-1]
