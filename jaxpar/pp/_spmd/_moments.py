"""A schedule as moments: what every rank does at each, and when what it sends arrives.

one phase      a tick is a moment: each rank does one action                          sent in a moment, there in the next
two phases     a tick is F, then B: grids with pairs (OVERLAP_F_B)

               tick      |    F    |    B    |    F    |        messages of a phase travel beside the next one, unless
               messages             >-- F ---> >-- B -->        somebody there waits for them
"""

from dataclasses import dataclass

from jaxpar.pp._schedule._action import BACKWARD, Action, Op
from jaxpar.pp._schedule._lockstep import ticks
from jaxpar.pp._schedule._schedule import Schedule


@dataclass(frozen=True)
class Moments:
    """Args:
    num_phases: of a tick.
    rows: for each moment what every rank does; ticks times phases.
    rank_of_stage: of the schedule.
    is_late: for each phase whether its messages arrive at the end of the next one, instead of its own.
    """

    num_phases: int
    rows: tuple[tuple[Action | None, ...], ...]
    rank_of_stage: tuple[int, ...]
    is_late: tuple[bool, ...]

    @property
    def num_ticks(self) -> int:
        """Rounds of the loop."""
        return len(self.rows) // self.num_phases

    def offset(self, action: Action) -> int | None:
        """How many ranks on its message goes, round the ring; None if it sends none to another rank."""
        to = receiver(action, len(self.rank_of_stage))
        if to is None:
            return None
        return (self.rank_of_stage[to] - self.rank_of_stage[action.stage]) % len(self.rows[0]) or None


def moments(schedule: Schedule) -> Moments:
    """The moments of a schedule of computations."""
    columns = ticks(schedule)
    num_phases = 2 if Op.OVERLAP_F_B in schedule.ops else 1
    rows = []
    for tick in range(max(map(len, columns))):
        parts = [row[tick].parts if tick < len(row) and row[tick] else () for row in columns]  # type: ignore
        for phase in range(num_phases):
            rows.append(tuple(_of_phase(some, phase, num_phases) for some in parts))
    found = Moments(num_phases, tuple(rows), schedule.rank_of_stage, (True,) * num_phases)
    return Moments(num_phases, found.rows, found.rank_of_stage, _late(found))


def receiver(action: Action, n_stages: int) -> int | None:
    """The stage that waits for what an action makes."""
    if action.op == Op.F and action.stage + 1 < n_stages:
        return action.stage + 1
    return action.stage - 1 if action.op in BACKWARD and action.stage > 0 else None


def _of_phase(parts: tuple[Action, ...], phase: int, num_phases: int) -> Action | None:
    return next((part for part in parts if num_phases == 1 or (part.op != Op.F) == bool(phase)), None)


def _late(found: Moments) -> tuple[bool, ...]:
    """A phase's messages may take the next phase's time if nobody uses one there."""
    n_stages = len(found.rank_of_stage)
    is_late = [True] * found.num_phases
    for moment, (now, after) in enumerate(zip(found.rows, found.rows[1:], strict=False)):
        for action in now:
            if action is None or found.offset(action) is None:
                continue
            to = receiver(action, n_stages)
            forward = action.op == Op.F
            if any(
                a and a.stage == to and a.microbatch == action.microbatch and (a.op == Op.F) == forward
                for a in after
            ):
                is_late[moment % found.num_phases] = False
    return tuple(is_late)
