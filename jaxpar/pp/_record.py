"""When each action of a run was dispatched, and when its result was there; the run is as it is without.

    this thread        dispatches 0F0 and a marker behind it, 1F0 and a marker, ...         waits for nothing more than usual
    a thread per rank  waits for the marker of 0F0, looks at the clock, waits for the next

The marker is a copy of one number, because the results themselves may be handed on (donated) before the thread looks.
"""

import concurrent.futures
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxpar.mesh import all_gather_object, barrier
from jaxpar.pp._ranks import Ranks
from jaxpar.pp._schedule._action import Action
from jaxpar.pp._walk import Leaves, Watch

_SWITCH_S = (
    1e-4  # how long Python lets the dispatching thread run on while another one could look at the clock
)


def record(run: Callable[[Watch], object], ranks: Ranks) -> dict[Action, tuple[float, float]]:
    """Of each action the seconds of its dispatch and of its end, by one clock; all processes must call it.

    Clocks of several hosts are set by a barrier.

    Args:
        run: runs a schedule, compiled before, and tells the watch of each action.
        ranks: where stages lie.
    """
    if ranks.is_spread:
        barrier("a recorded run of a pipeline")
    zero_s = time.perf_counter()
    found: list[tuple[Action, float, concurrent.futures.Future[float]]] = []
    with contextlib.ExitStack() as stack:
        threads = {
            rank: stack.enter_context(concurrent.futures.ThreadPoolExecutor(1)) for rank in sorted(ranks.here)
        }
        stack.enter_context(_switching_often())

        def watch(action: Action, dispatched_s: float, results: Leaves) -> None:
            marker = _number(results[0].addressable_shards[0].data) if results else None
            end = threads[ranks.of_stage[action.stage]].submit(_when_there, marker)
            found.append((action, dispatched_s - zero_s, end))

        run(watch)
        times = [(str(action), start_s, end.result() - zero_s) for action, start_s, end in found]
    everyones = all_gather_object(times) if ranks.is_spread else [times]
    return {Action.parse(text): (start_s, end_s) for some in everyones for text, start_s, end_s in some}


@jax.jit
def _number(x: jax.Array) -> jax.Array:
    return x.reshape(-1)[:1]


def _when_there(marker: Any) -> float:
    jax.block_until_ready(marker)
    return time.perf_counter()


@contextlib.contextmanager
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
