"""In-place recovery, the worker's half: leave the world that lost a worker, and train on in the next, in one process.

    world n    join --> train(run) ------------------------------------------> all have come to its end
                           | a worker is lost: a collective fails, or a safe point raises
                           v
               word from the launcher?  no --> the error goes on, this worker fails
                           | yes
                           v
               leave JAX (client, backend, programs) --> "came" --> world n + 1 at its coordinator

Proved on CPU workers of one host (Gloo) with jax 0.10 and 0.12, rank 0 included. What makes it possible: the coordination
service is recoverable and runs outside the workers, and survivors cut their connections (`_cut.py`). The launcher guards
each step: a worker that comes too late makes all start again.
"""

import gc
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import jax

from jaxpar import _compat
from jaxpar._errors import ProcessGroupError
from jaxpar.mesh._distributed import init_process_group, keep_programs_if_asked
from jaxpar.mesh._group import Membership, Patience, ProcessGroup, Venue, group_slot
from jaxpar.mesh._host_copy import HostCopy
from jaxpar.mesh._join import join
from jaxpar.mesh._launched import launched, venue_of_attempt
from jaxpar.mesh._leave import leave_properly
from jaxpar.mesh._meeting import meet
from jaxpar.mesh._recovery import Recovery
from jaxpar.mesh._word import News, Word

T = TypeVar("T")

_WORD_S = 5.0
"""How long a worker whose collective has failed waits to hear why: the launcher sees a death when its process is gone."""
_CACHING = ("jaxpar.", "jax.experimental.multihost_utils", "orbax.checkpoint.")
_LOSS = re.compile(r"Gloo|Connection (?:reset|closed) by peer")


def run_recoverable(
    train: Callable[[Recovery], T], *, timeout_s: float = 300.0, shutdown_timeout_s: float = 300.0
) -> T:
    """Joins the job and trains; called again in the same process when a worker was lost and replaced.

    With `jaxpar-launch --recover in-place --max-restarts N` a lost worker (killed, or failed by an error of its own) costs the
    others neither process nor memory: their `train` is left by an exception, JAX is shut down and joined again with a new
    process in the place of the lost one, and `train` is called anew. It must build everything that JAX holds - mesh,
    model, optimizer, `TrainStep` - and take up the state from its argument. A worker that cannot leave (stuck outside JAX, no safe
    point within `--recover-timeout`) makes all start again. Everywhere else it is `init_process_group()` and `train`.

    Source: torchrun knows restarts only; the idea is that of torchft and of Gemini's checkpoints in memory.

    Args:
        train: Called with the world's `Recovery`.
        timeout_s: As for `init_process_group`.
        shutdown_timeout_s: As for `init_process_group`.

    Returns:
        What `train` returns.

    Raises:
        ProcessGroupError: The workers cannot meet.

    Example:
        >>> from jaxpar.mesh import run_recoverable
        >>> def train(run):
        ...     start, state = run.resume({"w": 1.0})
        ...     for i in range(start, 3):
        ...         state = {"w": state["w"] * 2}
        ...         run.keep(i + 1, state)
        ...     return state["w"]
        >>> run_recoverable(train)
        8.0
    """
    place = launched()
    if place is None or place.recovery is None or place.venue is None or place.member.world_size == 1:
        init_process_group(timeout_s=timeout_s, shutdown_timeout_s=shutdown_timeout_s)
        return train(Recovery(None, restart_count=place.restart_count if place is not None else 0))
    patience = Patience(timeout_s, _compat.SERVICE_HEARTBEAT_S, shutdown_timeout_s)
    member = replace(place.member, recoverable=True)
    number, coordinator, kept = place.restart_count, place.recovery, None
    keep_programs_if_asked(member)
    is_first = True
    while True:
        venue = venue_of_attempt(place.venue.address, place.venue.token, number)
        group = _join(replace(member, coordinator_address=coordinator), patience, venue, number)
        if is_first:
            leave_properly()
            is_first = False
        end = _run(train, Recovery(group, kept=kept, restart_count=number), group, number)
        if isinstance(end, _Done):
            return end.value
        kept, coordinator, number = end.kept, end.news.coordinator, number + 1
        _leave(group, number)


@dataclass(frozen=True)
class _Done(Generic[T]):
    """All workers have come to the end of `train`."""

    value: T


@dataclass(frozen=True)
class _Left:
    """The world was left: for which next one, and with what."""

    news: News
    kept: HostCopy | None


def _run(
    train: Callable[[Recovery], T], run: Recovery, group: ProcessGroup, number: int
) -> "_Done[T] | _Left":
    """One world, to its end or to the loss of a worker."""
    with Word(group, number + 1) as word:
        try:
            value = train(run)
            # Whoever is done waits here for the others, and returns with them if one is lost meanwhile.
            meet(
                group,
                "run_recoverable (the end of train)",
                True,
                judge=lambda _: True,
                timeout_s=group.shutdown_timeout_s,
            )
            group.store.set("recovery/over", True)
            return _Done(value)
        except Exception as error:
            news = word.await_s(_WORD_S if _is_sign_of_loss(error) else 0.0)
            if news is None:
                raise
            traceback.clear_frames(error.__traceback__)  # they hold arrays of the old world
        return _Left(news, run.kept)


def _is_sign_of_loss(error: Exception) -> bool:
    """Whether it may say that another process is gone; JAX raises a ValueError where a collective fails at dispatch."""
    return isinstance(error, jax.errors.JaxRuntimeError | ProcessGroupError) or bool(_LOSS.search(str(error)))


def _join(member: Membership, patience: Patience, venue: Venue, number: int) -> ProcessGroup:
    group = join(member, patience, venue=venue)
    group_slot().group = group
    _check_whole(_compat.start_only_backend(), member)
    group.store.set(f"recovery/{number}/joined/{member.rank}", True)
    return group


def _check_whole(num_processes: int, member: Membership) -> None:
    """A backend of this process alone would train in silence, or hang."""
    if num_processes != member.world_size:
        raise ProcessGroupError(
            f"run_recoverable: JAX sees {num_processes} of {member.world_size} processes (this is rank {member.rank}): a thread"
            " of the world before uses JAX still. End such threads when train is left, by `finally` or `with`."
        )


def _leave(group: ProcessGroup, number: int) -> None:
    """Out of the old world; then the launcher hears that this worker comes to the next one."""
    _forget_caches()
    gc.collect()  # what `train` made, before the backend it lives on
    _compat.leave_jax()
    gc.collect()
    with group.store.clone() as store:  # the old connection was interrupted
        store.set(f"recovery/{number}/came/{group.rank}", True)
    group_slot().group = None
    group.close()


def _forget_caches() -> None:
    """What was cached is of the old world: meshes hold its backend (threads, sockets), and processes have new addresses.

    JAX clears its caches with the backends, except those of `multihost_utils` (0.10 to 0.12); Orbax (0.12) keeps a client.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(_CACHING):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear") and value is not group_slot:
                    value.cache_clear()
