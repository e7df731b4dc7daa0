"""What the tick loop reads: for every rank and tick which program runs, on which microbatch, on which registers.

    moment   rank 0        registers of a kind
      0      0F0           k0 -> 0
      1      0F1           k1 -> 1
      2      0B0           k0 <- 0, then 0 is free
      3      0F2           k2 -> 0

Messages are numbered by phase and by how many ranks on they go; in each, values of a kind have fixed places.
"""

import collections
import heapq
from dataclasses import dataclass, field

import numpy as np

from jaxpar.pp._schedule._action import Action, Op
from jaxpar.pp._spmd._moments import Moments
from jaxpar.pp._spmd._values import Kind, Pool, Value, Values

Program = tuple[Op, int]  # of a stage, the first of those that are alike
GROUPS = ((Op.F,), (Op.B, Op.I), (Op.W,))


@dataclass(frozen=True)
class Message:
    """What goes from ranks to others, the same number of ranks on.

    Args:
        kinds: of its places.
        pairs: sender and receiver.
        landings: place and pool: where what stands in a place may go.
    """

    kinds: tuple[Kind, ...]
    pairs: tuple[tuple[int, int], ...]
    landings: tuple[tuple[int, Pool], ...]


@dataclass(frozen=True, eq=False)
class Phase:
    """One phase of every tick.

    Args:
        programs: in groups, in each of which ranks choose one: F, then B and I, then W. Of a tick's groups a rank is idle in
            all but one; apart, they do not write what others of the same choice read.
        messages: by offset.
        is_late: whether messages arrive at the end of the next phase.
        choice: i32[ranks, ticks, groups]: 0 is idling, 1 the first program of the group.
        microbatch: i32[ranks, ticks].
        registers: i32[ranks, ticks, n]: of what is read, kept, and handed on within the rank.
        arrivals: by offset, i32[ranks, ticks, landings]: the registers for a message that arrives in this tick.
    """

    programs: tuple[tuple[Program, ...], ...]
    messages: dict[int, Message]
    is_late: bool
    choice: np.ndarray
    microbatch: np.ndarray
    registers: np.ndarray
    arrivals: dict[int, np.ndarray]


@dataclass(frozen=True, eq=False)
class Tables:
    """Args:
    phases: of a tick.
    num_registers: of each pool.
    """

    phases: tuple[Phase, ...]
    num_registers: dict[Pool, int]


def places(message: Message, kinds: list[Kind]) -> list[int]:
    """Where values of these kinds stand in a message."""
    free = collections.defaultdict[Kind, list[int]](list)
    for place, kind in enumerate(message.kinds):
        free[kind].append(place)
    return [free[kind].pop(0) for kind in kinds]


def tables(moments: Moments, values: Values, alike: tuple[int, ...]) -> Tables:
    """Number programs, messages and registers; a stage runs the programs of the first one that is like it."""
    return _Maker(moments, values, alike).made()


@dataclass
class _Rank:
    """Registers of one rank, while they are given out."""

    home: dict[Value, int] = field(default_factory=dict)
    free: dict[Pool, list[int]] = field(default_factory=lambda: collections.defaultdict(list))
    used: dict[Pool, int] = field(default_factory=lambda: collections.defaultdict(int))

    def put(self, value: Value, pool: Pool, *, is_read: bool) -> int:
        """A register for a value; what nobody reads frees it at once."""
        if self.free[pool]:
            register = heapq.heappop(self.free[pool])
        else:
            register = self.used[pool]
            self.used[pool] += 1
        if is_read:
            self.home[value] = register
        else:
            heapq.heappush(self.free[pool], register)
        return register

    def release(self, value: Value, pool: Pool) -> None:
        heapq.heappush(self.free[pool], self.home.pop(value))


class _Maker:
    def __init__(self, moments: Moments, values: Values, alike: tuple[int, ...]) -> None:
        self.moments, self.values, self.alike = moments, values, alike
        self.ranks = [_Rank() for _ in moments.rows[0]]
        self.last_read = {
            value: moment
            for moment, row in enumerate(moments.rows)
            for action in row
            if action is not None
            for value in values.read(action)
        }
        self.messages = [self._messages(phase) for phase in range(moments.num_phases)]
        # (moment of arrival, rank) -> phase of sending, offset, values
        self.arriving: dict[tuple[int, int], list[tuple[int, int, list[Value]]]] = collections.defaultdict(
            list
        )
        self.operands: dict[tuple[int, int], list[int]] = {}
        self.landed: dict[tuple[int, int, int, int], list[int]] = {}  # phase, offset, rank, tick

    def made(self) -> Tables:
        for moment, row in enumerate(self.moments.rows):
            for rank, action in enumerate(row):
                if action is not None:
                    self._act(moment, rank, action)
            for rank in range(len(row)):
                for arrival in self.arriving.pop((moment, rank), ()):
                    self._land(moment, rank, *arrival)
        assert not self.arriving and not any(rank.home for rank in self.ranks), "nothing is left over"
        used: dict[Pool, int] = collections.defaultdict(int)
        for rank in self.ranks:
            for pool, count in rank.used.items():
                used[pool] = max(used[pool], count)
        # One more register takes what a rank is sent and does not want.
        landed = {pool for phase in self.messages for m in phase.values() for _, pool in m.landings}
        num_registers = {pool: count + (pool in landed) for pool, count in used.items()}
        phases = tuple(self._phase(i, used) for i in range(self.moments.num_phases))
        return Tables(phases, num_registers)

    def _act(self, moment: int, rank: int, action: Action) -> None:
        registers, values = self.ranks[rank], self.values
        operands = []
        for value in values.read(action):
            operands.append(registers.home[value])
        for value in values.read(action):
            if self.last_read[value] == moment:
                registers.release(value, values.pool_of(value))
        handed_on, offset = values.handed_on(action), self.moments.offset(action)
        stored = values.kept(action) + (handed_on if offset is None else [])
        operands += [self._put(rank, value) for value in stored]
        self.operands[moment, rank] = operands
        if offset is not None:
            phase = moment % self.moments.num_phases
            to, at = (rank + offset) % len(self.ranks), moment + self.moments.is_late[phase]
            self.arriving[at, to].append((phase, offset, handed_on))

    def _put(self, rank: int, value: Value) -> int:
        return self.ranks[rank].put(value, self.values.pool_of(value), is_read=value in self.last_read)

    def _land(self, moment: int, rank: int, phase: int, offset: int, values: list[Value]) -> None:
        message = self.messages[phase][offset]
        row = [-1] * len(message.landings)
        for place, value in zip(places(message, [*map(self.values.kind_of, values)]), values, strict=True):
            row[message.landings.index((place, self.values.pool_of(value)))] = self._put(rank, value)
        self.landed[phase, offset, rank, moment // self.moments.num_phases] = row

    def _messages(self, phase: int) -> dict[int, Message]:
        most: dict[int, collections.Counter[Kind]] = {}
        sent: dict[int, list[tuple[tuple[int, int], list[Value]]]] = collections.defaultdict(list)
        for row in self.moments.rows[phase :: self.moments.num_phases]:
            for rank, action in enumerate(row):
                offset = None if action is None else self.moments.offset(action)
                if action is not None and offset is not None:
                    values = self.values.handed_on(action)
                    kinds = collections.Counter(map(self.values.kind_of, values))
                    most[offset] = most.get(offset, collections.Counter()) | kinds
                    sent[offset].append(((rank, (rank + offset) % len(row)), values))
        return {offset: self._message(kinds, sent[offset]) for offset, kinds in sorted(most.items())}

    def _message(
        self, kinds: collections.Counter[Kind], sent: list[tuple[tuple[int, int], list[Value]]]
    ) -> Message:
        message = Message(tuple(kinds.elements()), tuple(sorted({pair for pair, _ in sent})), ())
        landings = set()
        for _, values in sent:
            taken = places(message, [*map(self.values.kind_of, values)])
            landings |= set(zip(taken, map(self.values.pool_of, values), strict=True))
        return Message(message.kinds, message.pairs, tuple(sorted(landings)))

    def _phase(self, phase: int, used: dict[Pool, int]) -> Phase:
        rows = self.moments.rows[phase :: self.moments.num_phases]
        found = sorted({self._program(a) for row in rows for a in row if a is not None})
        programs = tuple(filter(None, (tuple(p for p in found if p[0] in ops) for ops in GROUPS)))
        mine = {at: x for at, x in self.operands.items() if at[0] % self.moments.num_phases == phase}
        shape = (len(self.ranks), len(rows))
        choice = np.zeros((*shape, len(programs)), np.int32)
        microbatch = np.zeros(shape, np.int32)
        registers = np.zeros((*shape, max(map(len, mine.values()), default=0)), np.int32)
        for (moment, rank), operands in mine.items():
            action, tick = self.moments.rows[moment][rank], moment // self.moments.num_phases
            assert action is not None and action.microbatch is not None
            for group, some in enumerate(programs):
                if self._program(action) in some:
                    choice[rank, tick, group] = 1 + some.index(self._program(action))
            microbatch[rank, tick] = action.microbatch
            registers[rank, tick, : len(operands)] = operands
        messages = self.messages[phase]
        arrivals = {offset: self._arrivals(phase, offset, shape, used) for offset in messages}
        is_late = self.moments.is_late[phase]
        return Phase(programs, messages, is_late, choice, microbatch, registers, arrivals)

    def _program(self, action: Action) -> Program:
        return action.op, self.alike[action.stage]

    def _arrivals(self, phase: int, offset: int, shape: tuple[int, int], used: dict[Pool, int]) -> np.ndarray:
        nowhere = np.array([used[pool] for _, pool in self.messages[phase][offset].landings], np.int32)
        found = np.broadcast_to(nowhere, (*shape, len(nowhere))).copy()
        for (of, by, rank, tick), row in self.landed.items():
            if (of, by) == (phase, offset):
                found[rank, tick] = np.where(np.array(row) < 0, nowhere, row)
        return found
