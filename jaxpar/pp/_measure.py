"""Measure what the stages of a pipeline take, alone: costs for `simulate` and `auto_schedule`.

F, B, I, W      seconds of each stage's program on zeros, its inputs ready      median of some runs
latency         seconds to move what a stage sends to its neighbour             the slowest boundary
activation      bytes on a device that one microbatch holds from F to B or I, and from I to W
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.mesh import all_gather_object
from jaxpar.pp._ranks import Ranks
from jaxpar.pp._schedule._costs import Costs
from jaxpar.pp._stage import Stage
from jaxpar.pp._walk import StageArrays

Leaves = list[Any]


def measure(
    stages: Sequence[Stage], arrays: Sequence[StageArrays | None], ranks: Ranks, *, repeats: int
) -> Costs:
    """Run each program of each stage `repeats` times, one at a time; results are thrown away.

    Args:
        stages: the programs.
        arrays: what a step begins with; sums and gradients in them are used up.
        ranks: where stages lie. Several processes must measure together; each its own stages.
        repeats: how often; one more run before compiles.
    """
    mine = {
        s: _stage(stage, a, repeats)
        for s, (stage, a) in enumerate(zip(stages, arrays, strict=True))
        if a is not None
    }
    hops = [_hop(stages, s, ranks, repeats) for s in range(len(stages) - 1)]
    everyones = all_gather_object([mine, hops]) if ranks.is_spread else [[mine, hops]]
    found = {s: numbers for some, _ in everyones for s, numbers in some.items()}
    by_kind: dict[str, Any] = {kind: tuple(found[s][kind] for s in range(len(stages))) for kind in found[0]}
    latency: float = max((max(some) for _, some in everyones if some), default=0.0)
    return Costs(latency=latency, **by_kind)


def _stage(stage: Stage, a: StageArrays, repeats: int) -> dict[str, Any]:
    """Seconds and bytes of one stage."""
    received, after = _zeros(stage.received), _zeros(stage.after)

    def forward() -> Any:
        _, kept, _, a.sums = stage.forward(
            a.params, a.fixed, a.changed, a.batch, np.int32(0), received, a.sums
        )
        return kept, a.sums

    F, (kept, _) = _timed(forward, repeats)

    def backward() -> Any:
        before, a.grads = stage.backward(a.params, kept, received, after, a.grads)
        return before, a.grads

    B, _ = _timed(backward, repeats)
    I, (_, carry) = _timed(lambda: stage.inputs(a.params, kept, received, after), repeats)
    used = stage.kept_for_weights(kept, received, after)

    def weights() -> Any:
        a.grads = stage.weights(a.params, used, carry, a.grads)
        return a.grads

    W, _ = _timed(weights, repeats)
    kept_for_W = _num_bytes([*used, *carry])
    activation = max(_num_bytes([*kept, *received]), kept_for_W)
    return {"F": F, "B": B, "I": I, "W": W, "activation": activation, "kept_for_W": kept_for_W}


def _hop(stages: Sequence[Stage], s: int, ranks: Ranks, repeats: int) -> float:
    """Seconds from one stage to the next, as the next one sees it; 0 where it is not here."""
    source, target, wanted = ranks.of_stage[s], ranks.of_stage[s + 1], stages[s + 1].received
    values = _zeros(stages[s].sent) if source in ranks.here else None

    def move() -> Leaves:
        arrival = ranks.move(values, source, target, wanted, f"what stage {s} sends, to measure")
        arrived = [] if arrival is None else arrival()
        ranks.transport.wait(arrived)
        return arrived

    seconds, _ = _timed(move, repeats)
    return seconds if target in ranks.here else 0.0


def _zeros(types: Sequence[jax.ShapeDtypeStruct]) -> Leaves:
    return [jnp.zeros(t.shape, t.dtype, device=t.sharding) for t in types]


def _timed(run: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Median seconds of a program from call to result, and the result."""
    result = jax.block_until_ready(run())
    seconds = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        result = jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds), result


def _num_bytes(values: Leaves) -> float:
    """Bytes that arrays take on each device."""
    shapes = {id(x): (x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in values}
    return float(sum(np.prod(shape, dtype=int) * size for shape, size in shapes.values()))
