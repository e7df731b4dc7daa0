"""Who is in a job of several hosts, as data that changes only by these steps: no sockets, no clocks.

    gathering --arrive, drop--> gathering --seal--> running --finish---------------------> over
        ^                                              |   ---a failure, none are left---> over
        '----- a restart, or hosts came or left -------'

Every launcher reads the same state, makes the same step and writes it by compare-and-set: whoever is first is right, and the
others see that nothing is left to do. A step that does not fit the state any more changes nothing.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Member:
    """One host's launcher.

    Args:
        id: drawn when it starts.
        host: its name, for people.
        address: where its workers can be reached.
        nproc: how many it starts.
        node_rank: the place it was given by hand, or None.
        last_rank: its place in the round before, or None.
    """

    id: str
    host: str
    address: str
    nproc: int
    node_rank: int | None = None
    last_rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """Why a round ended before its workers were done.

    Args:
        kind: "failure" of a worker, "hang", a launcher that was "lost" or "left" because it was told to, or hosts that "joined".
        host: where.
        text: what happened, in one line.
        exit_code: of the job, if it ends with this.
        rank: that failed.
        lost: id of the launcher that is lost.
    """

    kind: str
    host: str
    text: str
    exit_code: int
    rank: int | None = None
    lost: str = ""

    @property
    def costs_a_restart(self) -> bool:
        """Hosts that come or leave do not (row E3)."""
        return self.kind in ("failure", "hang", "lost")


@dataclass(frozen=True, kw_only=True)
class State:
    """What all launchers agree on.

    Args:
        round: which round gathers or runs.
        restarts: how many were used.
        is_running: whether the round is sealed.
        members: of the round, in the order of their ranks once it is sealed.
        newcomers: who arrived while it ran, or found no room.
        over: how the job ended; None until then.
    """

    round: int = 0
    restarts: int = 0
    is_running: bool = False
    members: tuple[Member, ...] = ()
    newcomers: tuple[Member, ...] = ()
    over: End | None = None

    def to_wire(self) -> dict[str, Any]:
        """As JSON."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_wire(cls, wire: dict[str, Any] | None) -> "State":
        """From JSON; None is the state before anyone came."""
        if wire is None:
            return cls()
        members, newcomers = (tuple(Member(**m) for m in wire[name]) for name in ("members", "newcomers"))
        over = wire["over"] and End(**wire["over"])
        return cls(**{**wire, "members": members, "newcomers": newcomers, "over": over})

    def rank_of(self, member_id: str) -> int | None:
        """The place of a launcher among those of the round."""
        return next((i for i, member in enumerate(self.members) if member.id == member_id), None)

    def first_rank(self, group_rank: int) -> int:
        """The rank of the first worker of a launcher (row E4)."""
        return sum(member.nproc for member in self.members[:group_rank])

    @property
    def world_size(self) -> int:
        """All workers."""
        return sum(member.nproc for member in self.members)

    # Steps

    def arrive(self, member: Member, *, most: int) -> "State":
        """A launcher wants to take part: in this round, or in the next one if this is running or full."""
        if self.over or member.id in self._ids:
            return self
        if self.is_running or len(self.members) >= most:
            return replace(self, newcomers=(*self.newcomers, member))
        return replace(self, members=(*self.members, member))

    def drop(self, ids: Iterable[str]) -> "State":
        """Launchers that gave up, or were lost, before the round began."""
        gone = set(ids)
        newcomers = tuple(m for m in self.newcomers if m.id not in gone)
        members = self.members if self.is_running else tuple(m for m in self.members if m.id not in gone)
        return replace(self, members=members, newcomers=newcomers)

    def seal(self, round_: int) -> "State":
        """The round begins: by place given by hand, then by place in the round before, then by arrival."""
        if self.is_running or self.over or self.round != round_:
            return self
        far = float("inf")
        order = sorted(
            self.members,
            key=lambda m: (
                far if m.node_rank is None else m.node_rank,
                far if m.last_rank is None else m.last_rank,
            ),
        )
        return replace(self, members=tuple(order), is_running=True)

    def end(self, round_: int, end: End, *, max_restarts: int, least: int, most: int) -> "State":
        """The round has ended early: gather again, or the job is over."""
        if not self.is_running or self.over or self.round != round_:
            return self
        too_few = end.kind == "left" and len(self.members) - 1 + len(self.newcomers) < least
        if too_few or (end.costs_a_restart and self.restarts >= max_restarts):
            return replace(self, over=end)
        return State(
            round=self.round + 1,
            restarts=self.restarts + end.costs_a_restart,
            members=self.newcomers[:most],
            newcomers=self.newcomers[most:],
        )

    def finish(self, end: End) -> "State":
        """The job is over."""
        return self if self.over else replace(self, over=end)

    @property
    def _ids(self) -> set[str]:
        return {member.id for member in (*self.members, *self.newcomers)}
