"""The laws of a schedule, each a function that raises when it is broken.

(ownership, in `_scan.py`) -> completeness -> order -> matching -> progress -> memory: each relies on those before it.
"""

from collections.abc import Iterator
from itertools import chain

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._action import BACKWARD, COMMUNICATION, COMPUTE, Action, Op
from jaxpar.pp._schedule._broken import broken
from jaxpar.pp._schedule._cells import Cells
from jaxpar.pp._schedule._grid import Rows
from jaxpar.pp._schedule._live import live_counts, peak_live
from jaxpar.pp._schedule._messages import message_out_of, other_end
from jaxpar.pp._schedule._stage_state import check_stage_state
from jaxpar.pp._schedule._walk import walk


def check_laws(rows: Rows, cells: Cells, memory_limit: int | tuple[int, ...] | None) -> None:
    """Raise `ScheduleError` for the first law that is broken."""
    _check_completeness(rows, cells)
    _check_order(rows, cells)
    check_stage_state(rows)
    if cells.is_lowered:
        _check_matching(rows, cells)
        _check_channels(rows, cells)
    _check_progress(rows, cells)
    if memory_limit is not None:
        _check_memory(rows, memory_limit)


def _check_completeness(rows: Rows, cells: Cells) -> None:
    steps = cells.steps
    computed = [stages for op in COMPUTE for stages in steps[op]]
    n_microbatches = 1 + max((max(found) for found in computed if found), default=-1)
    if n_microbatches == 0:
        raise ScheduleError(
            "law 'completeness' broken: the schedule computes nothing. "
            'Give each rank a row of actions, for instance [["0F0", "0B0"]].',
            law="completeness",
        )
    goes_backward = any(any(steps[op]) for op in (Op.B, Op.I, Op.W))
    every = range(n_microbatches)
    for stage in range(len(cells.rank_of_stage)):
        f, b, i, w = (steps[op][stage].keys() for op in (Op.F, Op.B, Op.I, Op.W))
        is_whole = len(f) == n_microbatches and i == w and not b & i
        if is_whole and len(b) + len(i) == (n_microbatches if goes_backward else 0):
            continue
        for microbatch in every:
            has = {op for op in COMPUTE if microbatch in steps[op][stage]}
            if (problem := _incomplete(rows, cells, (stage, microbatch), has, goes_backward)) is not None:
                raise problem


def _incomplete(
    rows: Rows, cells: Cells, of: tuple[int, int], has: set[Op], goes_backward: bool
) -> ScheduleError | None:
    stage, microbatch = of
    if has in (({Op.F, Op.B}, {Op.F, Op.I, Op.W}) if goes_backward else ({Op.F},)):
        return None
    if Op.B in has and has & {Op.I, Op.W}:
        extra = Op.I if Op.I in has else Op.W
        return broken(
            "completeness",
            rows,
            cells[stage, extra, microbatch],
            f"{stage}{extra}{microbatch} computes again what {stage}B{microbatch} computes",
            "A backward is either B, or I and W: remove one of the two forms.",
        )
    lacks = Op.F if Op.F not in has else Op.B if not has & {Op.I, Op.W} else Op.I if Op.W in has else Op.W
    rank = cells.rank_of_stage[stage]
    return broken(
        "completeness",
        rows,
        (rank, len(rows[rank])),
        f"{stage}{lacks}{microbatch} is missing in row {rank}",
        f"Every stage runs every microbatch that any stage runs: F once"
        f"{', and B once or I and W once' if goes_backward else ''}. Add the cell.",
    )


def _check_order(rows: Rows, cells: Cells) -> None:
    """What an action uses on its own rank stands earlier in the row."""
    steps, rank_of_stage = cells.steps, cells.rank_of_stage
    for stage in range(len(rank_of_stage)):
        for (op, on), (earlier_op, earlier_stage), why in _pairs(stage, rank_of_stage):
            earlier = steps[earlier_op][earlier_stage]
            if not earlier:
                continue
            for microbatch, step in steps[op][on].items():
                if earlier.get(microbatch, -1) >= step:
                    raise broken(
                        "order",
                        rows,
                        (rank_of_stage[on], step),
                        f"{on}{op}{microbatch} runs before {earlier_stage}{earlier_op}{microbatch} "
                        f"(step {earlier[microbatch]})",
                        f"{why} Swap the two cells.",
                    )


def _pairs(
    stage: int, rank_of_stage: tuple[int, ...]
) -> Iterator[tuple[tuple[Op, int], tuple[Op, int], str]]:
    """Pairs (op, stage), (op, stage) on one rank of which the second must stand earlier, and why."""
    for op in BACKWARD:
        yield (op, stage), (Op.F, stage), "A backward needs its own forward on the same stage first."
        yield (op, stage), (Op.RECV_B, stage), "A computation uses what was received before it."
        yield (Op.SEND_B, stage), (op, stage), "Only what is computed can be sent."
    yield (Op.W, stage), (Op.I, stage), "W uses what I kept on the same stage."
    yield (Op.F, stage), (Op.RECV_F, stage), "A computation uses what was received before it."
    yield (Op.SEND_F, stage), (Op.F, stage), "Only what is computed can be sent."
    if stage + 1 < len(rank_of_stage) and rank_of_stage[stage] == rank_of_stage[stage + 1]:
        yield (Op.F, stage + 1), (Op.F, stage), f"Stage {stage} hands its output over on this rank."
        for op in BACKWARD:
            for of_next in BACKWARD:
                why = f"Stage {stage + 1} hands its gradient over on this rank."
                yield (op, stage), (of_next, stage + 1), why


def _check_matching(rows: Rows, cells: Cells) -> None:
    """Every crossing between ranks has its send and its receive, and there are no others."""
    wanted: set[Action] = set()
    for rank, step, part in _parts(rows):
        ends = message_out_of(part, cells.rank_of_stage)
        for end in () if ends is None else ends:
            wanted.add(end)
            if end.microbatch not in cells.steps[end.op][end.stage]:
                raise broken(
                    "matching",
                    rows,
                    (rank, step),
                    f"what {part} makes is used on another rank, but row {cells.rank_of_stage[end.stage]} has no {end}",
                    f"Add {end} to that row, or let add_communication(schedule) write all messages.",
                )
    for rank, step, part in _parts(rows):
        if part.op in COMMUNICATION and part not in wanted:
            raise broken(
                "matching",
                rows,
                (rank, step),
                f"no computation on another rank makes or uses the message of {part}",
                "Remove the cell: stages on one rank hand over without messages, and the pipeline's ends have none.",
            )


def _check_channels(rows: Rows, cells: Cells) -> None:
    """Part of 'progress': both ends of a pair of ranks list their messages in the same order.

    One in-order channel for both directions is the least that any transport offers; there a message that the two ends
    do not reach together blocks all later ones.
    """
    channels: dict[tuple[int, int], list[tuple[int, Action]]] = {}
    for rank, step, part in _parts(rows):
        if part.op in COMMUNICATION:
            peer = cells.rank_of_stage[other_end(part).stage]
            channels.setdefault((rank, peer), []).append((step, part))
    for (rank, peer), mine in channels.items():
        if rank > peer:
            continue
        for (step, part), (its_step, its_part) in zip(mine, channels[peer, rank], strict=True):
            if other_end(part) != its_part:
                raise broken(
                    "progress",
                    rows,
                    (rank, step),
                    f"deadlock: rank {rank} has {part} (step {step}) where rank {peer} has {its_part} "
                    f"(step {its_step}), the other end of another message",
                    "Messages between two ranks are delivered in the order posted, so both rows list them in one "
                    "order; add_communication(schedule) writes such an order.",
                )


def _check_progress(rows: Rows, cells: Cells) -> None:
    stuck = walk(rows, cells).stuck
    if stuck:
        rank = min(stuck)
        waits = "; ".join(
            f"rank {r} at step {step} ({rows[r][step]}) waits for {rows[peer][at]} of rank {peer}"
            for r, (step, (peer, at)) in sorted(stuck.items())[:4]
        )
        mend = "Each waits for something that stands behind another wait. Reorder one of these rows."
        raise broken("progress", rows, (rank, stuck[rank][0]), f"deadlock: {waits}", mend)


def _check_memory(rows: Rows, memory_limit: int | tuple[int, ...]) -> None:
    limits = (memory_limit,) * len(rows) if isinstance(memory_limit, int) else memory_limit
    if len(limits) != len(rows):
        raise ScheduleError(
            f"law 'memory': memory_limit has {len(limits)} entries for {len(rows)} ranks. "
            "Give one number, or one for each rank.",
            law="memory",
        )
    for rank, (row, limit) in enumerate(zip(rows, limits, strict=True)):
        if (peak := peak_live(row)) > limit:
            step = next(step for step, held in enumerate(chain(live_counts(row), [peak])) if held > limit)
            raise broken(
                "memory",
                rows,
                (rank, min(step, len(row) - 1)),
                f"rank {rank} holds {peak} activations at once, memory_limit is {limit}",
                "Run a backward earlier in this row, use fewer forwards in the warm-up, or raise memory_limit; "
                "auto_schedule(..., memory_limit=...) searches for a schedule that fits.",
            )


def _parts(rows: Rows) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            if action is not None:
                for part in action.parts:
                    yield rank, step, part
