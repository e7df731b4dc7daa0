"""One meeting of all processes in the store: everybody says something, rank 0 judges, everybody hears the verdict.

    rank 0    set rank/0, wait rank/0..N-1 --> judge(said) --> verdict <- compare_set(absent -> said)
    rank r    set rank/r, wait verdict ------------------------^
    anyone whose deadline passes:              verdict <- compare_set(absent -> missing ranks)

The verdict is set once and for all by an atomic compare_set, so every process hears the same one, also a process
that arrives after the others gave up. The last to leave removes the keys. Barriers, object collectives and the
fingerprint are all this one meeting, so each of them has a deadline and names who is missing.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, unquote

from jaxpar._errors import ProcessGroupError
from jaxpar.mesh._group import ProcessGroup
from jaxpar_launch.flight import heartbeat
from jaxpar_launch.store import StoreError, StoreTimeoutError, StoreValue


def meet(
    group: ProcessGroup,
    name: str,
    said: StoreValue,
    *,
    judge: Callable[[list[Any]], StoreValue],
    wanted: Sequence[int] = (),
    members: Sequence[int] | None = None,
    timeout_s: float | None = None,
) -> tuple[Any, list[Any]]:
    """Meets all processes of the group, or some of them, under one name.

    Args:
        group: The process group.
        name: Which meeting; processes must come to the meetings of one name in the same order.
        said: What this process contributes.
        judge: Turns the contributions of all members into the verdict; runs on the first member only.
        wanted: Ranks whose contributions this process wants to read, if the verdict permits (is `True`).
        members: Ranks that meet, the same on all of them; default all.
        timeout_s: Deadline from now; default the group's.

    Returns:
        The verdict, and the contributions of the wanted ranks.

    Raises:
        ProcessGroupError: Some ranks did not come in time, on every process that did.
        WorkerLostError: One was lost and is being replaced (`run_recoverable`).
    """
    group.check()
    ranks = tuple(range(group.world_size)) if members is None else tuple(members)
    if len(ranks) == 1:
        return judge([said]), [said for _ in wanted]
    timeout_s = group.timeout_s if timeout_s is None else timeout_s
    heartbeat(name)
    place = f"{group.prefix}/{quote(name, safe='')}/{group.next_round(name)}/"
    try:
        verdict = _hear_verdict(group, place, said, judge, ranks, timeout_s)
        if "missing" in verdict:
            raise ProcessGroupError(_who_is_missing(group, name, place, verdict))
        read = wanted if verdict["said"] is True else ()
        heard = group.store.get_many([f"{place}rank/{rank}" for rank in read])
        if group.store.add(f"{place}left") == len(ranks):
            group.store.delete_prefix(place)
        heartbeat(f"after {name}")
        return verdict["said"], heard
    except StoreError as error:
        raise ProcessGroupError(f"{name}: rank {group.rank} lost the job's store: {error}") from error


def _hear_verdict(
    group: ProcessGroup,
    place: str,
    said: StoreValue,
    judge: Callable[[list[Any]], StoreValue],
    ranks: Sequence[int],
    timeout_s: float,
) -> dict[str, Any]:
    store, verdict_key = group.store, f"{place}verdict"
    chairs = {rank: f"{place}rank/{rank}" for rank in ranks}
    verdict: dict[str, Any] | None
    start = time.monotonic()
    store.set(chairs[group.rank], said)
    try:
        if group.rank != ranks[0]:
            return store.get(verdict_key, timeout_s)
        if (verdict := store.try_get(verdict_key)) is not None:  # the others have given up already
            return verdict
        verdict = {"said": judge(store.get_many(list(chairs.values()), timeout_s))}
    except StoreTimeoutError:
        there = set(store.keys(f"{place}rank/"))
        missing = [rank for rank, chair in chairs.items() if chair not in there]
        # Everybody is there but the verdict is late: the judge is held up between its chair and its verdict.
        verdict = {
            "missing": missing or [ranks[0]],
            "waited_s": round(time.monotonic() - start, 1),
            "by": group.rank,
        }
    return store.compare_set(verdict_key, None, verdict)


def _who_is_missing(group: ProcessGroup, name: str, place: str, verdict: dict[str, Any]) -> str:
    missing, all_ranks = verdict["missing"], group.world_size
    if group.rank in missing:
        return (
            f"{name}: this process, rank {group.rank}, came too late: rank {verdict['by']} had waited"
            f" {verdict['waited_s']:g} s and gave up. Missing then: ranks {missing} of {all_ranks}."
            " A meeting that failed for one process fails for all. Give a longer timeout_s if the ranks may be"
            " this far apart."
        )
    doing = "".join(f"\n    rank {rank}: {_last_seen(group, place, rank)}" for rank in missing[:8])
    return (
        f"{name}: ranks {missing} of {all_ranks} did not come within {verdict['waited_s']:g} s"
        f" (this is rank {group.rank}).{doing}\n"
        "Every process must make the same calls in the same order: look for a branch on the rank, a loop whose"
        " length differs over ranks, or a process that has ended. Give a longer timeout_s if they are only slow."
    )


def _last_seen(group: ProcessGroup, place: str, rank: int) -> str:
    """Why a rank may be missing, as far as the store knows: it failed, or it waits at another meeting."""
    if (failure := group.store.try_get(f"{group.prefix}/failed/{rank}")) is not None:
        return f"failed with {failure}"
    others = [key for key in group.store.keys(f"{group.prefix}/") if key.endswith(f"/rank/{rank}")]
    names = [
        key.removeprefix(f"{group.prefix}/").split("/")[0] for key in others if not key.startswith(place)
    ]
    return f"waits at {unquote(names[0])} instead" if names else "is at no meeting"
