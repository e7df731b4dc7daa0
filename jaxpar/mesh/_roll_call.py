"""The roll call before `jax.distributed`: who is here, and do we all mean the same job?

    each process   number = add(count);  set entry/number;  read all entries
                   a fault seen, or all present?  --> verdict <- compare_set(absent -> faults)      the first decides
                   wait verdict;  deadline?       --> verdict <- compare_set(absent -> missing ranks)

JAX itself aborts the process in these cases (SIGABRT, nobody named) or does not notice. The store is linearizable and
everyone writes before reading, so the last to arrive sees all entries: no process needs to be in charge, which
matters when rank 0 is the one that is missing or doubled.
"""

import os
import socket
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from typing import Any

from jaxpar import _compat
from jaxpar._errors import ProcessGroupError
from jaxpar.mesh._group import Membership
from jaxpar_launch.store import StoreClient, StoreTimeoutError

_SHOWN = 8


@dataclass(frozen=True)
class Entry:
    """What one process says at the roll call."""

    rank: int
    world_size: int
    pid: int
    host: str
    jax: str

    @classmethod
    def of(cls, member: Membership) -> "Entry":
        """What the process that runs this says."""
        return cls(member.rank, member.world_size, os.getpid(), socket.gethostname(), _compat.jax_version())

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def roll_call(store: StoreClient, entry: Entry, *, prefix: str, timeout_s: float) -> int:
    """Waits until every rank of the job has come exactly once and all agree.

    Returns:
        The local rank: how many smaller ranks are on this host.

    Raises:
        ProcessGroupError: On every process that came: ranks missing, doubled or out of range, world sizes or JAX
            versions that differ.
    """
    number = store.add(f"{prefix}/count")
    store.set(f"{prefix}/entry/{number}", asdict(entry))
    entries = _entries(store, prefix)
    faults = faults_of(entries)
    verdict_key = f"{prefix}/verdict"
    if faults or len(entries) == entry.world_size:
        store.compare_set(verdict_key, None, {"faults": faults, "count": len(entries)})
    try:
        verdict = store.get(verdict_key, timeout_s)
    except StoreTimeoutError:
        entries = _entries(store, prefix)
        faults = faults_of(entries) or [_missing(entries, timeout_s)]
        verdict = store.compare_set(verdict_key, None, {"faults": faults, "count": len(entries)})
    _raise_faults(verdict, entry, number, store, prefix)
    return sum(other.host == entry.host and other.rank < entry.rank for other in _entries(store, prefix))


def _raise_faults(
    verdict: dict[str, Any], entry: Entry, number: int, store: StoreClient, prefix: str
) -> None:
    faults = verdict["faults"]
    if not faults and number > verdict["count"]:
        faults = faults_of(_entries(store, prefix)) or ["the roll call is over"]
        faults.append("The job is already complete and goes on without this process.")
    if faults:
        raise ProcessGroupError(
            f"init_process_group: the processes of this job do not fit together (this is rank {entry.rank} of"
            f" {entry.world_size}, {entry}):\n" + "\n".join(f"    {fault}" for fault in faults)
        )


def faults_of(entries: list[Entry]) -> list[str]:
    """What is wrong with the processes that have come; nothing yet about those that have not."""
    faults = [
        f"rank {entry.rank} is out of range ({entry}): a world of {entry.world_size} has ranks 0 to"
        f" {entry.world_size - 1}. Give each process its own rank."
        for entry in entries
        if not 0 <= entry.rank < entry.world_size
    ]
    for rank, holders in sorted(_grouped(entries, lambda entry: entry.rank).items()):
        if len(holders) > 1:
            listed = ", ".join(map(str, holders))
            faults.append(
                f"rank {rank} is taken {len(holders)} times: {listed}. Give each process its own rank."
            )
    for name, of in (("world_size", lambda e: e.world_size), ("the JAX version", lambda e: e.jax)):
        by_value = _grouped(entries, of)
        if len(by_value) > 1:
            listed = "; ".join(
                f"{value} on ranks {_shown(sorted(e.rank for e in holders))}"
                for value, holders in by_value.items()
            )
            faults.append(f"{name} differs: {listed}. All processes of a job need the same.")
    return faults


def _missing(entries: list[Entry], timeout_s: float) -> str:
    world_size = entries[0].world_size
    missing = sorted(set(range(world_size)) - {entry.rank for entry in entries})
    return (
        f"ranks {_shown(missing)} of {world_size} did not come within {timeout_s:.1f} s. Look at their output: they"
        " may not have been started, have failed before init_process_group, or wait elsewhere."
    )


def _entries(store: StoreClient, prefix: str) -> list[Entry]:
    keys = sorted(store.keys(f"{prefix}/entry/"), key=lambda key: int(key.rpartition("/")[2]))
    return [Entry(**said) for said in store.get_many(keys)]


def _grouped(entries: list[Entry], of: Callable[[Entry], Hashable]) -> dict[Any, list[Entry]]:
    groups: dict[Any, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[of(entry)].append(entry)
    return groups


def _shown(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= _SHOWN else f"{ranks[:_SHOWN]} and {len(ranks) - _SHOWN} more"
