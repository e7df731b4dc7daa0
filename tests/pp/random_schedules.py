"""Random lawful schedules, made without the code under test: any order in which a pipeline can run."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

Token = tuple[int, str, int]  # stage, op, microbatch


@dataclass(frozen=True)
class Plan:
    """Rows of tokens (None: a bubble) and where the stages lie."""

    rows: list[list[Token | None]]
    rank_of_stage: tuple[int, ...]

    def text(self) -> list[list[str]]:
        return [["" if t is None else f"{t[0]}{t[1]}{t[2]}" for t in row] for row in self.rows]


def uses(token: Token, n_stages: int, split: set[tuple[int, int]]) -> Iterator[Token]:
    """What a computation needs to have happened, on any rank."""
    stage, op, microbatch = token
    if op == "F" and stage > 0:
        yield stage - 1, "F", microbatch
    if op in "BI":
        yield stage, "F", microbatch
        if stage + 1 < n_stages:
            yield stage + 1, "I" if (stage + 1, microbatch) in split else "B", microbatch
    if op == "W":
        yield stage, "I", microbatch


def tokens(n_stages: int, n_microbatches: int, split: set[tuple[int, int]]) -> list[Token]:
    pairs = [(stage, microbatch) for stage in range(n_stages) for microbatch in range(n_microbatches)]
    return [
        (stage, op, microbatch)
        for stage, microbatch in pairs
        for op in ("FIW" if (stage, microbatch) in split else "FB")
    ]


def random_plan(rng: random.Random) -> Plan:
    """Take any action that is ready, until all are done; now and then a bubble."""
    n_ranks = rng.randint(1, 4)
    n_stages = rng.randint(n_ranks, 6)
    rank_of_stage = [*range(n_ranks), *(rng.randrange(n_ranks) for _ in range(n_stages - n_ranks))]
    rng.shuffle(rank_of_stage)
    split = {(s, m) for s in range(n_stages) for m in range(4) if rng.random() < 0.5}
    left = tokens(n_stages, rng.randint(1, 4), split)
    done: set[Token] = set()
    rows: list[list[Token | None]] = [[] for _ in range(n_ranks)]
    while left:
        token = rng.choice([t for t in left if all(used in done for used in uses(t, n_stages, split))])
        left.remove(token)
        done.add(token)
        row = rows[rank_of_stage[token[0]]]
        row.extend([None] * rng.choice((0, 0, 0, 1, 2)))
        row.append(token)
    return Plan(rows, tuple(rank_of_stage))


def can_run(plan: Plan) -> bool:
    """Whether all ranks reach their ends: the plainest simulation there is."""
    rows = [[t for t in row if t is not None] for row in plan.rows]
    split = {(t[0], t[2]) for row in rows for t in row if t[1] == "I"}
    done: set[Token] = set()
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row and all(used in done for used in uses(row[0], len(plan.rank_of_stage), split)):
                done.add(row.pop(0))
                moved = True
    return not any(rows)


def is_ordered(plan: Plan) -> bool:
    """Whether nothing stands before what it uses in its own row."""
    split = {(t[0], t[2]) for row in plan.rows for t in row if t is not None and t[1] == "I"}
    for row in plan.rows:
        seen: set[Token] = set()
        mine = {t for t in row if t is not None}
        for token in filter(None, row):
            if any(u in mine and u not in seen for u in uses(token, len(plan.rank_of_stage), split)):
                return False
            seen.add(token)
    return True
