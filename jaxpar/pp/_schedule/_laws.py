"""The laws of a schedule, each a function that raises when it is broken.

ownership -> completeness -> order -> matching -> progress -> memory: each may rely on those before it.
"""

from collections.abc import Iterator

from jaxpar._errors import ScheduleError
from jaxpar.pp._schedule._action import COMMUNICATION, COMPUTE, OF_A_STAGE, Action, Op
from jaxpar.pp._schedule._grid import Rows, grid
from jaxpar.pp._schedule._live import peak_live
from jaxpar.pp._schedule._needs import (
    Where,
    handed_over_by,
    kept_by,
    key,
    message_into,
    receiver_of,
    sender_of,
)
from jaxpar.pp._schedule._walk import backward_of, walk

Key = tuple[int, Op, int]


def check_laws(
    rows: Rows, rank_of_stage: tuple[int, ...], memory_limit: int | tuple[int, ...] | None
) -> None:
    """Raise `ScheduleError` for the first law that is broken."""
    _check_ownership(rows, rank_of_stage)
    where = find_cells(rows)
    _check_completeness(rows, where, rank_of_stage)
    _check_order(rows, where, rank_of_stage)
    _check_stage_state(rows)
    if any(part.op in COMMUNICATION for _, _, part in _parts(rows)):
        _check_matching(rows, where, rank_of_stage)
    _check_progress(rows, where, rank_of_stage)
    if memory_limit is not None:
        _check_memory(rows, memory_limit)


def find_owners(rows: Rows) -> tuple[int, ...]:
    """For each stage the rank whose row computes it first; a stage that nobody computes is an error."""
    owner: dict[int, int] = {}
    for rank, _, part in _parts(rows):
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


def find_cells(rows: Rows) -> dict[Key, tuple[int, int]]:
    """(stage, op, microbatch) -> (rank, step); an action that occurs twice is an error."""
    where: dict[Key, tuple[int, int]] = {}
    for rank, step, part in _parts(rows):
        if part.op not in OF_A_STAGE:
            if (k := key(part)) in where:
                first = "rank {}, step {}".format(*where[k])
                raise _broken(
                    "completeness",
                    rows,
                    (rank, step),
                    f"{part} was already at {first}",
                    "Remove one of the two.",
                )
            where[k] = rank, step
    return where


def _check_ownership(rows: Rows, rank_of_stage: tuple[int, ...]) -> None:
    wrong = [(s, r) for s, r in enumerate(rank_of_stage) if not 0 <= r < len(rows)]
    if wrong:
        stage, rank = wrong[0]
        raise ScheduleError(
            f"law 'ownership' broken: rank_of_stage gives stage {stage} to rank {rank}, but there are "
            f"{len(rows)} rows, ranks 0 to {len(rows) - 1}. Add rows, or change rank_of_stage.",
            law="ownership",
        )
    for rank, step, part in _parts(rows):
        if part.stage >= len(rank_of_stage):
            raise _broken(
                "ownership",
                rows,
                (rank, step),
                f"{part} names stage {part.stage}, but rank_of_stage has {len(rank_of_stage)} stages",
                f"Give rank_of_stage an entry for stage {part.stage}, or rename the cell.",
            )
        if (owner := rank_of_stage[part.stage]) != rank:
            raise _broken(
                "ownership",
                rows,
                (rank, step),
                f"{part} runs on rank {rank}, but stage {part.stage} is held by rank {owner}",
                f"Move the cell to row {owner}, or set rank_of_stage[{part.stage}] = {rank}.",
            )


def _check_completeness(rows: Rows, where: Where, rank_of_stage: tuple[int, ...]) -> None:
    computed = [k for k in where if k[1] in COMPUTE]
    n_microbatches = 1 + max((microbatch for _, _, microbatch in computed), default=-1)
    goes_backward = any(op != Op.F for _, op, _ in computed)
    if not computed:
        raise ScheduleError(
            "law 'completeness' broken: the schedule computes nothing. "
            'Give each rank a row of actions, for instance [["0F0", "0B0"]].',
            law="completeness",
        )
    for stage, rank in enumerate(rank_of_stage):
        for microbatch in range(n_microbatches):
            has = {op for op in COMPUTE if (stage, op, microbatch) in where}
            wanted = ({Op.F},) if not goes_backward else ({Op.F, Op.B}, {Op.F, Op.I, Op.W})
            if has in wanted:
                continue
            if Op.B in has and has & {Op.I, Op.W}:
                extra = next(op for op in (Op.I, Op.W) if op in has)
                raise _broken(
                    "completeness",
                    rows,
                    where[stage, extra, microbatch],
                    f"{stage}{extra}{microbatch} computes again what {stage}B{microbatch} computes",
                    "A backward is either B, or I and W: remove one of the two forms.",
                )
            lacks = "F" if Op.F not in has else "B" if not has & {Op.I, Op.W} else "I" if Op.W in has else "W"
            raise _broken(
                "completeness",
                rows,
                (rank, len(rows[rank])),
                f"{stage}{lacks}{microbatch} is missing in row {rank}",
                f"Every stage (0 to {len(rank_of_stage) - 1}) runs every microbatch (0 to {n_microbatches - 1}): "
                f"F once{', and B once or I and W once' if goes_backward else ''}. Add the cell.",
            )


def _check_order(rows: Rows, where: Where, rank_of_stage: tuple[int, ...]) -> None:
    for rank, step, part in _parts(rows):
        if part.op in OF_A_STAGE:
            continue
        for earlier, why in _local_needs(part, where, rank_of_stage):
            if where[earlier][1] >= step:
                stage, op, microbatch = earlier
                raise _broken(
                    "order",
                    rows,
                    (rank, step),
                    f"{part} runs before {stage}{op}{microbatch} (step {where[earlier][1]})",
                    f"{why} Swap the two cells.",
                )


def _local_needs(part: Action, where: Where, rank_of_stage: tuple[int, ...]) -> Iterator[tuple[Key, str]]:
    """What must stand earlier in the same row, and why."""
    stage, microbatch = part.stage, part.microbatch
    assert microbatch is not None
    if part.op in COMPUTE:
        if (kept := kept_by(part)) is not None:
            why = f"{'A backward needs its own forward' if kept == Op.F else 'W uses what I kept'} on the same stage."
            yield (stage, kept, microbatch), why
        if (given := handed_over_by(part, n_stages=len(rank_of_stage))) is not None:
            neighbour, ops = given
            if rank_of_stage[neighbour] == rank_of_stage[stage]:
                for op in ops:
                    if (neighbour, op, microbatch) in where:
                        yield (neighbour, op, microbatch), f"Stage {neighbour} hands it over on this rank."
        receive = message_into(part, rank_of_stage)
        if receive is not None and key(receive) in where:
            yield key(receive), "A computation uses what was received before it."
    elif part.op == Op.SEND_F and (stage, Op.F, microbatch) in where:
        yield (stage, Op.F, microbatch), "Only what is computed can be sent."
    elif part.op == Op.SEND_B and (made := backward_of(stage, microbatch, where)) is not None:
        yield made, "Only what is computed can be sent."


def _check_stage_state(rows: Rows) -> None:
    """UNSHARD before use, RESHARD after it, REDUCE_GRAD once, after the stage's last backward: part of 'order'."""
    for rank, row in enumerate(rows):
        actions = [(step, part) for step, a in enumerate(row) if a is not None for part in a.parts]
        managed = {part.stage for _, part in actions if part.op == Op.UNSHARD}
        last = {part.stage: step for step, part in actions if part.op in (Op.B, Op.W)}
        whole: set[int] = set()
        reduced: set[int] = set()
        for step, part in actions:
            problem = _state_problem(part, step, managed=managed, whole=whole, reduced=reduced, last=last)
            if problem is not None:
                raise _broken("order", rows, (rank, step), *problem)
            if part.op == Op.UNSHARD:
                whole.add(part.stage)
            elif part.op == Op.RESHARD:
                whole.discard(part.stage)
            elif part.op == Op.REDUCE_GRAD:
                reduced.add(part.stage)


def _state_problem(
    part: Action, step: int, *, managed: set[int], whole: set[int], reduced: set[int], last: dict[int, int]
) -> tuple[str, str] | None:
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


def _check_matching(rows: Rows, where: Where, rank_of_stage: tuple[int, ...]) -> None:
    wanted: set[Key] = set()
    for rank, step, part in _parts(rows):
        if part.op in COMPUTE and (receive := message_into(part, rank_of_stage)) is not None:
            for message, at in (
                (receive, rank),
                (sender_of(receive), rank_of_stage[sender_of(receive).stage]),
            ):
                wanted.add(key(message))
                if key(message) not in where:
                    raise _broken(
                        "matching",
                        rows,
                        (rank, step),
                        f"{part} uses what stage {sender_of(receive).stage} on another rank made, "
                        f"but row {at} has no {message}",
                        f"Add {message} to row {at}, or let add_communication(schedule) write all messages.",
                    )
    for rank, step, part in _parts(rows):
        if part.op in COMMUNICATION and key(part) not in wanted:
            other = receiver_of(part) if part.op in (Op.SEND_F, Op.SEND_B) else sender_of(part)
            raise _broken(
                "matching",
                rows,
                (rank, step),
                f"{part} would meet {other}, but no computation on another rank uses this message",
                "Remove the cell: stages on one rank hand over without messages, and the pipeline's ends have none.",
            )


def _check_progress(rows: Rows, where: Where, rank_of_stage: tuple[int, ...]) -> None:
    stuck = walk(rows, where, rank_of_stage).stuck
    if stuck:
        rank = min(stuck)
        step, _ = stuck[rank]
        waits = "; ".join(
            f"rank {r} at step {s} ({rows[r][s]}) waits for {k[0]}{k[1]}{k[2]} of rank {where[k][0]}"
            for r, (s, k) in sorted(stuck.items())[:4]
        )
        sends = any(k[1] in COMMUNICATION for _, k in stuck.values())
        raise _broken(
            "progress",
            rows,
            (rank, step),
            f"deadlock: {waits}",
            "Messages between two ranks are delivered in the order posted, so both rows must list them in the same "
            "order; add_communication(schedule) writes such an order."
            if sends
            else "Each waits for something behind another's wait. Reorder one of these rows.",
        )


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
            raise _broken(
                "memory",
                rows,
                (rank, _first_over(row, limit)),
                f"rank {rank} holds {peak} activations at once, memory_limit is {limit}",
                "Run a backward earlier in this row, use fewer forwards in the warm-up, or raise memory_limit; "
                "auto_schedule(..., memory_limit=...) searches for a schedule that fits.",
            )


def _first_over(row: "Rows | tuple[Action | None, ...]", limit: int) -> int:
    held = 0
    for step, action in enumerate(row):
        parts = action.parts if isinstance(action, Action) else ()
        held += sum(part.op == Op.F for part in parts)
        if held > limit:
            return step
        held -= sum(part.op in (Op.B, Op.W) for part in parts)
    return 0


def _parts(rows: Rows) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            if action is not None:
                for part in action.parts:
                    yield rank, step, part


def _broken(law: str, rows: Rows, cell: tuple[int, int], what: str, mend: str) -> ScheduleError:
    rank, step = cell
    picture = "\n".join(f"    {line}" for line in grid(rows, mark=cell).splitlines())
    return ScheduleError(
        f"law '{law}' broken at rank {rank}, step {step}: {what}.\n{picture}\n{mend}", law=law
    )
