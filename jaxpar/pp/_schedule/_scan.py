"""Read a grid once: where every action stands. Finds cells in the wrong row and cells that occur twice."""

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._action import COMMUNICATION, COMPUTE, OF_A_STAGE, Action
from jaxpar.pp._schedule._broken import broken
from jaxpar.pp._schedule._cells import Cells
from jaxpar.pp._schedule._grid import Rows


def find_owners(rows: Rows) -> tuple[int, ...]:
    """For each stage the rank whose row computes it first; a stage that nobody computes is an error."""
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            for part in () if action is None else action.parts:
                if part.op in COMPUTE:
                    owner.setdefault(part.stage, rank)
    missing = sorted(set(range(max(owner, default=0) + 1)) - owner.keys())
    if missing:
        raise ScheduleError(
            f"law 'completeness' broken: no rank computes stage {missing[0]}; there are stages up to "
            f"{max(owner, default=0)}. Stages are counted from 0 without gaps: add its cells, "
            "or rename the stages above it.",
            law="completeness",
        )
    return tuple(owner[stage] for stage in range(len(owner)))


def find_cells(rows: Rows, rank_of_stage: tuple[int, ...]) -> Cells:
    """Where each action stands; raises for law ownership, and for an action that occurs twice (completeness)."""
    _check_table(rows, rank_of_stage)
    cells = Cells(rank_of_stage)
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            if action is None:
                continue
            for part in action.sub_actions or (action,):
                stage = part.stage
                if stage >= len(rank_of_stage) or rank_of_stage[stage] != rank:
                    raise _in_wrong_row(rows, rank_of_stage, part, (rank, step))
                if part.op in OF_A_STAGE:
                    continue
                steps = cells.steps[part.op][stage]
                if steps.setdefault(part.microbatch, step) != step:  # type: ignore
                    first = f"step {steps[part.microbatch]}"  # type: ignore
                    what = f"{part} was already at {first}"
                    raise broken("completeness", rows, (rank, step), what, "Remove one of the two.")
    cells.is_lowered = any(any(cells.steps[op]) for op in COMMUNICATION)
    return cells


def _check_table(rows: Rows, rank_of_stage: tuple[int, ...]) -> None:
    for stage, rank in enumerate(rank_of_stage):
        if not 0 <= rank < len(rows):
            raise ScheduleError(
                f"law 'ownership' broken: rank_of_stage gives stage {stage} to rank {rank}, but there are "
                f"{len(rows)} rows, ranks 0 to {len(rows) - 1}. Add rows, or change rank_of_stage.",
                law="ownership",
            )


def _in_wrong_row(
    rows: Rows, rank_of_stage: tuple[int, ...], part: Action, cell: tuple[int, int]
) -> ScheduleError:
    stage, rank = part.stage, cell[0]
    if stage >= len(rank_of_stage):
        what = f"{part} names stage {stage}, but rank_of_stage has {len(rank_of_stage)} stages"
        mend = f"Give rank_of_stage an entry for stage {stage}, or rename the cell."
    else:
        owner = rank_of_stage[stage]
        what = f"{part} runs on rank {rank}, but stage {stage} is held by rank {owner}"
        mend = f"Move the cell to row {owner}, or set rank_of_stage[{stage}] = {rank}."
    return broken("ownership", rows, cell, what, mend)
