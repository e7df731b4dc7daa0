"""Measure what the stages of a pipeline take, alone: costs for `simulate` and `auto_schedule`.

F, B, I, W      seconds of each stage's program, its inputs ready       median of some runs
latency         seconds to copy what a stage sends to its neighbour     the slowest boundary
activation      bytes on a device that one microbatch holds from F to B or I, and from I to W
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpar.pp._local import StageArrays
from jaxpar.pp._schedule._costs import Costs
from jaxpar.pp._stage import Stage

Leaves = list[Any]


def measure(stages: Sequence[Stage], arrays: Sequence[StageArrays], *, repeats: int) -> Costs:
    """Run each program of each stage `repeats` times, one at a time; results are thrown away.

    Args:
        stages: the programs.
        arrays: what a step begins with; sums and gradients in them are used up.
        repeats: how often; one more run before compiles.
    """
    received: Leaves = []
    forwards, kept_of, received_of, hops = [], [], [], [0.0]
    for s, (stage, a) in enumerate(zip(stages, arrays, strict=True)):

        def forward(stage: Stage = stage, a: StageArrays = a, received: Leaves = received) -> Any:
            sent, kept, _, a.sums = stage.forward(
                a.params, a.fixed, a.changed, a.batch, np.int32(0), received, a.sums
            )
            return sent, kept

        seconds, (sent, kept) = _timed(forward, repeats)
        forwards.append(seconds)
        kept_of.append(kept)
        received_of.append(received)
        if s + 1 < len(stages):
            shardings = stages[s + 1].received_shardings
            seconds, received = _timed(lambda sent=sent, to=shardings: jax.device_put(sent, to), repeats)
            hops.append(seconds)
    after: Leaves = []
    found: dict[str, list[float]] = {"B": [], "I": [], "W": [], "activation": [], "kept_for_W": []}
    for stage, a, kept, received in reversed([*zip(stages, arrays, kept_of, received_of, strict=True)]):

        def backward(stage: Stage = stage, a: StageArrays = a, rest: Any = (kept, received, after)) -> Any:
            before, a.grads = stage.backward(a.params, *rest, a.grads)
            return before, a.grads

        def inputs(stage: Stage = stage, a: StageArrays = a, rest: Any = (kept, received, after)) -> Any:
            return stage.inputs(a.params, *rest)

        found["B"].append(_timed(backward, repeats)[0])
        seconds, (before, carry) = _timed(inputs, repeats)
        found["I"].append(seconds)
        used = stage.kept_for_weights(kept, received, after)

        def weights(
            stage: Stage = stage, a: StageArrays = a, used: Leaves = used, carry: Leaves = carry
        ) -> Any:
            a.grads = stage.weights(a.params, used, carry, a.grads)
            return a.grads

        found["W"].append(_timed(weights, repeats)[0])
        found["activation"].append(max(_num_bytes([*kept, *received]), _num_bytes([*used, *carry])))
        found["kept_for_W"].append(_num_bytes([*used, *carry]))
        s = len(stages) - len(found["B"])
        if s > 0:
            after = jax.device_put(before, stages[s - 1].after_shardings)
    B, I, W, activation, kept_for_W = (tuple(values[::-1]) for values in found.values())
    return Costs(
        F=tuple(forwards), B=B, I=I, W=W, latency=max(hops), activation=activation, kept_for_W=kept_for_W
    )


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
