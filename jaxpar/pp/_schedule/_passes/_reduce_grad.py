"""Write down when a stage's gradients are reduced: right after its last backward.

0F0 0F1 0B0 0B1      ->      0F0 0F1 0B0 0B1 0REDUCE_GRAD
"""

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._schedule._passes._rebuilt import rebuilt
from jaxpar.pp._schedule._schedule import Schedule


def add_reduce_grad(schedule: Schedule) -> Schedule:
    """Add REDUCE_GRAD after the last B or W of every stage; source: PyTorch's reduce-grad pass.

    It stands for the reduction that DDP or FSDP makes over the data axis of the stage's mesh, once per step and stage,
    however many microbatches there are. Other stages of the rank go on meanwhile.

    Args:
        schedule: With a backward, and without REDUCE_GRAD.

    Raises:
        ScheduleError: Law completeness: the schedule only goes forward. Law order: it has REDUCE_GRAD already.

    Example:
        >>> add_reduce_grad(Schedule([["0F0", "0B0"]])).to_csv()
        '0F0,0B0,0REDUCE_GRAD\\n'
    """
    if schedule.is_forward_only:
        raise ScheduleError(
            "law 'completeness': add_reduce_grad: the schedule only goes forward, so there are no gradients.",
            law="completeness",
        )
    return rebuilt(schedule, [_with_reduce_grad(row) for row in schedule.rows])


def _with_reduce_grad(row: tuple[Action | None, ...]) -> list[Action | None]:
    last: dict[int, int] = {}
    for step, action in enumerate(row):
        for part in () if action is None else action.parts:
            if part.op in (Op.B, Op.W):
                last[part.stage] = step
    done_at: dict[int, list[int]] = {}
    for stage, step in last.items():
        done_at.setdefault(step, []).append(stage)
    written: list[Action | None] = []
    for step, action in enumerate(row):
        written.append(action)
        written.extend(Action(stage, Op.REDUCE_GRAD) for stage in done_at.get(step, ()))
    return written
