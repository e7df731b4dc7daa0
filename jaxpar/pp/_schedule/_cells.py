"""Where every action of a grid stands, and what it waits for on another rank.

A pipeline's data flow, from which laws, passes, the walk and the simulator are made:

    F(s, m)  <-  F(s-1, m)                               activation
    B(s, m)  <-  F(s, m), and B or I of (s+1, m)         stash, gradient
    I(s, m)  <-  the same
    W(s, m)  <-  I(s, m)

What stands on the same rank must stand earlier in its row; what crosses ranks is waited for. When the grid spells out
communication, the send is waited for in place of the computation before it.
"""

from collections.abc import Iterator, Mapping

from jaxpar.pp._schedule._action import Action, Op

Key = tuple[int, Op, int]
Steps = tuple[dict[int, int], ...]


class Cells(Mapping[Key, tuple[int, int]]):
    """(stage, op, microbatch) -> (rank, step), for all actions of a microbatch; parts of overlapped pairs too.

    steps: For each op and stage, the step of each microbatch; the rank is that of the stage.
    """

    def __init__(self, rank_of_stage: tuple[int, ...]) -> None:
        self.rank_of_stage = rank_of_stage
        self.steps: dict[Op, Steps] = {op: tuple({} for _ in rank_of_stage) for op in Op}
        self.is_lowered = False  # whether sends and receives are spelled out; set by the scan of the grid

    def __getitem__(self, wanted: Key) -> tuple[int, int]:
        stage, op, microbatch = wanted
        if not 0 <= stage < len(self.rank_of_stage):
            raise KeyError(wanted)
        return self.rank_of_stage[stage], self.steps[op][stage][microbatch]

    def __iter__(self) -> Iterator[Key]:
        for op, stages in self.steps.items():
            for stage, steps in enumerate(stages):
                yield from ((stage, op, microbatch) for microbatch in steps)

    def __len__(self) -> int:
        return sum(len(steps) for stages in self.steps.values() for steps in stages)

    def awaited(self, part: Action) -> tuple[int, int] | None:
        """The cell on another rank that `part`, an F, B, I or W, waits for; None if it needs no other rank."""
        stage, rank_of_stage, steps = part.stage, self.rank_of_stage, self.steps
        if part.op == Op.F:
            if stage == 0 or (rank := rank_of_stage[stage - 1]) == rank_of_stage[stage]:
                return None
            return rank, steps[Op.SEND_F if self.is_lowered else Op.F][stage - 1][part.microbatch]  # type: ignore
        if part.op == Op.W or stage + 1 == len(rank_of_stage):
            return None
        if (rank := rank_of_stage[stage + 1]) == rank_of_stage[stage]:
            return None
        if self.is_lowered:
            return rank, steps[Op.SEND_B][stage + 1][part.microbatch]  # type: ignore
        step = steps[Op.B][stage + 1].get(part.microbatch)  # type: ignore
        return rank, steps[Op.I][stage + 1][part.microbatch] if step is None else step  # type: ignore
