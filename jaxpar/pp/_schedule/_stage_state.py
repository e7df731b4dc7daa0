"""Part of law 'order': a stage's parameters are gathered before use, freed after it, its gradients reduced once.

UNSHARD ... F B ... (last B or W) ... REDUCE_GRAD ... RESHARD
"""

from jaxpar.pp._schedule._action import COMPUTE, OF_A_STAGE, Action, Op
from jaxpar.pp._schedule._broken import broken
from jaxpar.pp._schedule._grid import Rows


def check_stage_state(rows: Rows) -> None:
    """Raise `ScheduleError` if a stage with UNSHARD cells computes while sharded, or reduces too early or twice."""
    for rank, row in enumerate(rows):
        if not any(action is not None and action.op in OF_A_STAGE for action in row):
            continue
        actions = [(step, part) for step, a in enumerate(row) if a is not None for part in a.parts]
        managed = {part.stage for _, part in actions if part.op == Op.UNSHARD}
        last = {part.stage: step for step, part in actions if part.op in (Op.B, Op.W)}
        whole: set[int] = set()
        reduced: set[int] = set()
        for step, part in actions:
            problem = _problem(part, step, managed=managed, whole=whole, reduced=reduced, last=last)
            if problem is not None:
                raise broken("order", rows, (rank, step), *problem)
            if part.op == Op.UNSHARD:
                whole.add(part.stage)
            elif part.op == Op.RESHARD:
                whole.discard(part.stage)
            elif part.op == Op.REDUCE_GRAD:
                reduced.add(part.stage)


def _problem(
    part: Action, step: int, *, managed: set[int], whole: set[int], reduced: set[int], last: dict[int, int]
) -> tuple[str, str] | None:
    """What is wrong and how to mend it, or None."""
    stage = part.stage
    if part.op in COMPUTE and stage in managed and stage not in whole:
        return f"{part} runs while stage {stage} is sharded", f"Put {stage}UNSHARD before it."
    if part.op == Op.UNSHARD and stage in whole:
        return f"stage {stage} is already unsharded", "Remove the second UNSHARD."
    if part.op == Op.RESHARD and stage not in whole:
        return f"stage {stage} is not unsharded", f"Put {stage}UNSHARD before it, or remove the cell."
    if part.op == Op.REDUCE_GRAD and stage in reduced:
        return f"the gradients of stage {stage} are reduced twice", "Remove one of the two."
    if part.op == Op.REDUCE_GRAD and last.get(stage, -1) > step:
        why = f"{part} runs before the stage's last backward (step {last[stage]})"
        return why, f"Move it after step {last[stage]}."
    return None
