"""The programs of all stages, traced once, per device: forward, backward, and the two halves of the backward.

    whole    (params, rest, microbatch, number) -> (total, *others)            one trace, cut at the marks
    stage    forward    (params, others, received) -> (sent, results, kept)
             backward   (params, kept, received, gradients of sent) -> (gradients of received, of params)

Kept is what the backward needs of the forward and has not otherwise: neither parameters and what is made of them alone, nor
what was received. Everything here is code and types; arrays come in when it runs (`_stage.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import _compat
from jaxpar._module import vary
from jaxpar._residuals import is_floating, split_backward
from jaxpar.pp._cut import Piece, cut
from jaxpar.pp._halves import Halves, halves
from jaxpar.pp._inline import trace

Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class StageCode:
    """The programs of one stage.

    Args:
        params: which parameters it uses, by number in the whole program; all of them are trained.
        param_types: their types.
        others: which other inputs it uses: variables that are not trained, then the batch.
        results: which outputs of the whole program it makes.
        received: types of what comes from the stage before.
        sent: types of what goes to the stage after.
        kept: types of what the forward keeps for the backward.
        result_types: types of the results.
        gradients: types of the gradients of params.
        gradients_before: types of the gradients of what was received and is floating.
        gradients_after: types of the gradients of what was sent and is floating.
        number: which input of the batch is the microbatch's number, counted from the first of the batch.
        forward: `(*params, *others, *received) -> (*sent, *results, *kept)`.
        backward: `(*params, *kept, *received, *gradients of floating sent) -> (*gradients of params, *of floating received)`.
        halves: the same cut into input gradients and weight gradients.
        programs: forward and backward as closed jaxprs, to compare stages by.
    """

    params: tuple[int, ...]
    param_types: tuple[Any, ...]
    others: tuple[int, ...]
    results: tuple[int, ...]
    received: tuple[Any, ...]
    sent: tuple[Any, ...]
    kept: tuple[Any, ...]
    result_types: tuple[Any, ...]
    gradients: tuple[Any, ...]
    gradients_before: tuple[Any, ...]
    gradients_after: tuple[Any, ...]
    number: int
    forward: Callable[..., Leaves]
    backward: Callable[..., Leaves]
    halves: Halves
    programs: tuple[Any, Any]


def trace_stages(
    whole: Callable[..., Leaves],
    params: Leaves,
    rest: Leaves,
    batch: Leaves,
    n_stages: int,
    *,
    remat: bool = False,
    is_forward_only: bool = False,
) -> tuple[StageCode, ...]:
    """Trace and cut `whole(*params, *rest, *batch)`, whose first output is the total of the loss.

    Must run inside `jax.shard_map` over the mesh of a stage: arguments carry their types there. Nothing is computed.

    Args:
        whole: flat, with the entries of stages 1 to n_stages - 1 marked; its last outputs are `rest` after the forward.
        params: parameters that are trained; floating.
        rest: other variables of the model.
        batch: one microbatch, and its number.
        n_stages: how many stages.
        remat: keep only what was received; the backward computes the forward again.
        is_forward_only: keep nothing; there is no backward.

    Raises:
        ParallelizeError: a split point is not reached, out of order, a stage has nothing to do, or one stage changes a
            variable that another one reads.
    """
    inputs = [*params, *rest, *batch]
    closed = trace(whole, *inputs)
    num_state, first_changed = len(params) + len(rest), len(closed.jaxpr.outvars) - len(rest)
    updates = [(len(params) + i, first_changed + i) for i in range(len(rest))]
    pieces = cut(closed, [i < num_state for i in range(len(inputs))], n_stages, updates)
    received: Leaves = []
    stages = []
    for piece in pieces:
        if is_forward_only:
            stage, received = _forward_stage(piece, inputs, received, len(params), len(batch) - 1)
        else:
            stage, received = _stage(piece, inputs, received, len(params), len(batch) - 1, remat=remat)
        stages.append(stage)
    return tuple(stages)


def _stage(
    piece: Piece, inputs: Leaves, received: Leaves, num_params: int, number: int, *, remat: bool
) -> tuple[StageCode, Leaves]:
    """The code of one stage, and what it sends, as tracers."""
    params = tuple(i for i in piece.reads if i < num_params)
    others = tuple(i for i in piece.reads if i >= num_params)
    run = _run(piece.program)
    has_total = 0 in piece.results
    # Outputs that have a gradient first: what is sent and floating, the total; then the others.
    is_sent_floating = [is_floating(v.aval) for v in piece.program.jaxpr.outvars[: piece.num_sent]]
    with_gradient = [i for i, floating in enumerate(is_sent_floating) if floating]
    with_gradient += [piece.num_sent] if has_total else []
    num_outputs = piece.num_sent + len(piece.results)
    without = [i for i in range(num_outputs) if i not in with_gradient]
    order = with_gradient + without

    def fn(full: Leaves, given: Leaves) -> Leaves:
        outputs = run(*full, *given)
        return [outputs[i] for i in order]

    full, given = [inputs[i] for i in params], [*(inputs[i] for i in others), *received]
    is_received = [False] * len(others) + [True] * len(received)
    wanted = [got and is_floating(x) for got, x in zip(is_received, given, strict=True)]
    body = jax.checkpoint(fn) if remat else fn
    split = split_backward(
        body, full, given, [True] * len(full) + wanted, num_aux=len(without), stays=is_received
    )
    outputs, kept = split.forward(full, given)
    outputs = [outputs[order.index(i)] for i in range(num_outputs)]
    seeds = [jnp.ones_like(outputs[i]) for i in with_gradient]
    seeds = [vary(s, tuple(_axes(outputs[i]))) for s, i in zip(seeds, with_gradient, strict=True)]
    from_after = [s for s, i in zip(seeds, with_gradient, strict=True) if i < piece.num_sent]

    def forward(*values: Any) -> Leaves:
        outputs, kept = split.forward(list(values[: len(full)]), list(values[len(full) :]))
        return [*(outputs[order.index(i)] for i in range(num_outputs)), *kept]

    def backward(*values: Any) -> Leaves:
        left = iter(values)
        some_full, some_kept, some_received, gradients = (
            [next(left) for _ in xs] for xs in (full, kept, received, from_after)
        )
        if has_total:
            total = outputs[piece.num_sent]
            gradients.append(vary(jnp.ones(total.shape, total.dtype), tuple(_axes(total))))
        of_full, of_given = split.backward(
            some_full, some_kept, gradients, [*[None] * len(others), *some_received]
        )
        return [*of_full, *(x for x, want in zip(of_given, wanted, strict=True) if want)]

    closed = trace(backward, *full, *kept, *received, *from_after, through_remat=True)
    closed_forward = jax.make_jaxpr(forward)(*full, *given)
    types = tuple(closed.out_avals)
    stage = StageCode(
        params=params,
        param_types=_types(full),
        others=others,
        results=piece.results,
        received=_types(received),
        sent=_types(outputs[: piece.num_sent]),
        kept=_types(kept),
        result_types=_types(outputs[piece.num_sent :]),
        gradients=types[: len(full)],
        gradients_before=types[len(full) :],
        gradients_after=_types(from_after),
        number=number,
        forward=_run(closed_forward),
        backward=_run(closed),
        halves=halves(closed, [i >= len(full) for i in range(len(closed.jaxpr.outvars))]),
        programs=(closed_forward, closed),
    )
    return stage, outputs[: piece.num_sent]


def _forward_stage(
    piece: Piece, inputs: Leaves, received: Leaves, num_params: int, number: int
) -> tuple[StageCode, Leaves]:
    """The code of a stage that only evaluates: it keeps nothing, and its backward does nothing."""
    run = _run(piece.program)
    values = [*(inputs[i] for i in piece.reads), *received]
    outputs = run(*values)
    nothing = trace(lambda *values: [], *values)
    stage = StageCode(
        params=tuple(i for i in piece.reads if i < num_params),
        param_types=_types([inputs[i] for i in piece.reads if i < num_params]),
        others=tuple(i for i in piece.reads if i >= num_params),
        results=piece.results,
        received=_types(received),
        sent=_types(outputs[: piece.num_sent]),
        kept=(),
        result_types=_types(outputs[piece.num_sent :]),
        gradients=(),
        gradients_before=(),
        gradients_after=(),
        number=number,
        forward=run,
        backward=_run(nothing),
        halves=halves(nothing, []),
        programs=(piece.program, nothing),
    )
    return stage, outputs[: piece.num_sent]


def _run(closed: Any) -> Callable[..., Leaves]:
    return _compat.as_function(closed.jaxpr, closed.consts)


def _types(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(jax.typeof, values))


def _axes(x: Any) -> frozenset[str]:
    return _compat.varying_axes(jax.typeof(x))
