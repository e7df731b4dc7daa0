"""Schedules by name."""

import operator

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._builders import (
    _dual_pipe_v,
    _forward_only,
    _gpipe,
    _interleaved_1f1b,
    _lock_step,
    _looped_bfs,
    _one_f_one_b,
    _zb_v,
    _zero_bubble,
)
from jaxpar.pp._schedule._builders._builder import Builder, Shape
from jaxpar.pp._schedule._grid import Rows
from jaxpar.pp._schedule._passes._bubbles import earliest_rows
from jaxpar.pp._schedule._scan import find_cells
from jaxpar.pp._schedule._schedule import Schedule

BUILDERS: tuple[Builder, ...] = (
    _gpipe.BUILDER,
    _one_f_one_b.BUILDER,
    _one_f_one_b.EAGER_BUILDER,
    _lock_step.BUILDER,
    _looped_bfs.BUILDER,
    _interleaved_1f1b.BUILDER,
    _zero_bubble.BUILDER,
    _zero_bubble.H1_BUILDER,
    _zero_bubble.H2_BUILDER,
    _zb_v.BUILDER,
    _dual_pipe_v.BUILDER,
    _forward_only.BUILDER,
)


def get_schedule(
    name: str, n_ranks: int, n_microbatches: int, *, stages_per_rank: int | None = None
) -> Schedule:
    """The named schedule for these numbers, as a grid whose columns are ticks.

    Nothing moves here: a schedule is data. Sources: PyTorch's `get_schedule_class`; each schedule's paper stands in
    its file.

    Args:
        name: One of `schedule_names()` or an alias (ZB1P, ZBV, ZB-H1, ZB-H2); letter case does not matter.
        n_ranks: Ranks of the pipeline.
        n_microbatches: Microbatches of one step.
        stages_per_rank: Stages on each rank; by default 1, or 2 for the schedules that are about several.

    Raises:
        ScheduleError: Law definition: an unknown name, a number below 1, or numbers for which the schedule is not
            defined; the rule is named.

    Example:
        >>> print(get_schedule("1F1B", 2, 3))
        rank 0 | 0F0 0F1  .  0B0 0F2 0B1  .  0B2
        rank 1 |  .  1F0 1B0 1F1 1B1 1F2 1B2  .
    """
    builder = find_builder(name)
    wanted = builder.usual_stages_per_rank if stages_per_rank is None else stages_per_rank
    shape = _checked(builder, n_ranks, n_microbatches, wanted)
    rank_of_stage = builder.place(shape.n_ranks, shape.stages_per_rank)
    rows: Rows = [list(builder.row(shape, rank)) for rank in range(shape.n_ranks)]
    return Schedule(earliest_rows(rows, find_cells(rows, rank_of_stage)), rank_of_stage)


def schedule_names(*, stages_per_rank: int | None = None) -> tuple[str, ...]:
    """The names that `get_schedule` knows.

    Args:
        stages_per_rank: Only those that are defined for so many stages on each rank.

    Example:
        >>> schedule_names(stages_per_rank=1)[:3]
        ('GPipe', '1F1B', 'Eager1F1B')
    """
    return tuple(
        builder.name
        for builder in BUILDERS
        if stages_per_rank is None or builder.stages_per_rank in (None, stages_per_rank)
    )


def find_builder(name: str) -> Builder:
    """The builder of a name or alias."""
    for builder in BUILDERS:
        if name.lower() in (known.lower() for known in (builder.name, *builder.aliases)):
            return builder
    known = ", ".join(" / ".join((builder.name, *builder.aliases)) for builder in BUILDERS)
    raise ScheduleError(
        f"get_schedule: no schedule is called {name!r}. The names are {known}.", law="definition"
    )


def _checked(builder: Builder, n_ranks: int, n_microbatches: int, stages_per_rank: int) -> Shape:
    numbers = {"n_ranks": n_ranks, "n_microbatches": n_microbatches, "stages_per_rank": stages_per_rank}
    for what, number in numbers.items():
        try:
            numbers[what] = operator.index(number)
        except TypeError:
            raise ScheduleError(
                f"get_schedule: {what}={number!r} is no whole number.", law="definition"
            ) from None
        if numbers[what] < 1:
            raise ScheduleError(f"get_schedule: {what}={number} must be at least 1.", law="definition")
    shape = Shape(**numbers)
    given = ", ".join(f"{what}={number}" for what, number in numbers.items())
    if builder.stages_per_rank not in (None, shape.stages_per_rank):
        fits = ", ".join(schedule_names(stages_per_rank=shape.stages_per_rank))
        raise ScheduleError(
            f"get_schedule: {builder.name} is defined for stages_per_rank={builder.stages_per_rank}, "
            f"not {shape.stages_per_rank} ({given}). For {shape.stages_per_rank} stages on each rank there are {fits}.",
            law="definition",
        )
    if not builder.is_defined(shape):
        raise ScheduleError(
            f"get_schedule: {builder.name} is defined only if {builder.rule}; given {given}. "
            f"Change n_microbatches, or take {'LoopedBFS' if shape.stages_per_rank > 1 else '1F1B'}, "
            "which is defined for any numbers.",
            law="definition",
        )
    return shape
