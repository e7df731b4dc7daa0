"""Walk a schedule as its ranks would: each down its own row, waiting where it must.

An action is done as soon as what it waits for is done. Sends and receives are posted without waiting; a message
between two ranks is delivered when both have posted it and every earlier message of this pair of ranks is
delivered: one in-order channel for both directions, the least that any transport offers. What is left when nobody
can move is a deadlock.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from jaxpar.pp._schedule._action import BACKWARD, COMMUNICATION, COMPUTE, Action, Op
from jaxpar.pp._schedule._grid import Rows
from jaxpar.pp._schedule._needs import Where, key, message_into, needs, receiver_of, sender_of

Key = tuple[int, Op, int]


@dataclass(frozen=True)
class Walk:
    """The cells in an order that respects every wait, and where the ranks stand when nobody can move.

    order: (rank, step) of every action reached; `stuck`: step and what is waited for, by rank; empty if all is done.
    """

    order: tuple[tuple[int, int], ...]
    stuck: dict[int, tuple[int, Key]]


def walk(rows: Rows, where: Where, rank_of_stage: tuple[int, ...]) -> Walk:
    """Let every rank go as far as it can, until all are done or nobody can move."""
    return _Walker(rows, where, rank_of_stage).run()


@dataclass
class _Walker:
    rows: Rows
    where: Where
    rank_of_stage: tuple[int, ...]
    done: set[Key] = field(default_factory=set)
    order: list[tuple[int, int]] = field(default_factory=list)
    waiting: dict[Key, list[int]] = field(default_factory=lambda: defaultdict(list))
    posted: dict[tuple[int, int], deque[Key]] = field(default_factory=lambda: defaultdict(deque))

    def run(self) -> Walk:
        position = [0] * len(self.rows)
        stuck: dict[int, tuple[int, Key]] = {}
        runnable = deque(range(len(self.rows)))
        while runnable:
            rank = runnable.popleft()
            stuck.pop(rank, None)
            row = self.rows[rank]
            while position[rank] < len(row):
                step, action = position[rank], row[position[rank]]
                if action is not None:
                    if (missing := self._missing(action)) is not None:
                        self.waiting[missing].append(rank)
                        stuck[rank] = step, missing
                        break
                    self.order.append((rank, step))
                    for finished in self._do(rank, action):
                        self.done.add(finished)
                        runnable.extend(self.waiting.pop(finished, ()))
                position[rank] += 1
        return Walk(tuple(self.order), stuck)

    def _missing(self, action: Action) -> Key | None:
        for part in action.parts:
            if part.op in COMPUTE:
                for wanted in waits_for(part, self.where, self.rank_of_stage):
                    if wanted not in self.done:
                        return wanted
        return None

    def _do(self, rank: int, action: Action) -> list[Key]:
        if action.op in COMMUNICATION:
            return self._post(rank, action)
        return [key(part) for part in action.parts if part.op in COMPUTE]

    def _post(self, rank: int, action: Action) -> list[Key]:
        """Post one end of a message; the messages of this pair of ranks that are delivered by it."""
        is_send = action.op in (Op.SEND_F, Op.SEND_B)
        receive = receiver_of(action) if is_send else action
        peer = self.rank_of_stage[receive.stage if is_send else sender_of(receive).stage]
        mine, theirs = self.posted[rank, peer], self.posted[peer, rank]
        mine.append(key(receive))
        delivered = []
        while mine and theirs and mine[0] == theirs[0]:
            delivered.append(mine.popleft())
            theirs.popleft()
        return delivered


def waits_for(part: Action, where: Where, rank_of_stage: tuple[int, ...]) -> list[Key]:
    """What a computation waits for: earlier computations, or messages where the grid spells them out."""
    found = needs(part, where, n_stages=len(rank_of_stage))
    receive = message_into(part, rank_of_stage)
    if receive is None or key(receive) not in where:
        return found
    local = [wanted for wanted in found if wanted[0] == part.stage]
    return [*local, key(receive)]


def backward_of(stage: int, microbatch: int, where: Where) -> Key | None:
    """The B or I of a stage and microbatch, whichever the schedule has."""
    return next((k for op in sorted(BACKWARD) if (k := (stage, op, microbatch)) in where), None)
