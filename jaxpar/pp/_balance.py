"""Where to cut a model into stages of about equal weight: between the modules of its longest list.

embed  b0 b1 b2 b3 b4 b5  head        params    b0 b1 b2 | b3 b4 b5           weights of the modules alone
 1     2  2  2  2  2  2    6          flops     b0 b1 b2 b3 | b4 b5           what comes before and after counts too
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar import _compat
from jaxpar._errors import ParallelizeError
from jaxpar._pytree import PyTree
from jaxpar._residuals import is_floating
from jaxpar.mesh import broadcast_object
from jaxpar.pp._cut import Piece, cut
from jaxpar.pp._flops import num_flops
from jaxpar.pp._inline import trace
from jaxpar.pp._split_points import Splits, mark_splits

Balance = Literal["params", "flops", "time"]
Sample = tuple[Callable[[Any, Any], Any], PyTree]
_NUM_RUNS = 5


def balanced_splits(
    model: nnx.Module, n_stages: int, *, balance: Balance = "params", sample: Sample | None = None
) -> Splits:
    """Split points between the modules of the model's longest list, so that the heaviest stage is as light as can be.

    Args:
        model: whose modules are weighed.
        n_stages: how many stages; none is empty.
        balance: by what.
        sample: a loss function and a batch, for all but "params".

    Raises:
        ParallelizeError: no such balance, no sample, or fewer modules than stages.
    """
    if balance not in get_args(Balance):
        raise ParallelizeError(f'pipeline: balance={balance!r}; write "params", "flops" or "time".')
    if balance != "params" and sample is None:
        raise ParallelizeError(
            f"pipeline: balance={balance!r} weighs what the model does, so it needs an example of that. Write pipeline(..., "
            f"balance={balance!r}, sample=(loss_fn, batch)) with the loss function of the TrainStep and a batch of a few rows."
        )
    if n_stages == 1:
        return ()
    names, modules = _longest_list(model, n_stages)
    if balance == "params" or sample is None:
        weights: list[float] = [_num_parameters(module) or 1 for module in modules]
    else:
        names, weights = _weighed(model, names, sample, is_timed=balance == "time")
        _check_number(names, n_stages, balance)
    return tuple((names[start], "beginning") for start in lightest(weights, n_stages))


def lightest(weights: Sequence[float], n_parts: int) -> list[int]:
    """Where parts begin (all but the first) so that the heaviest part is as light as can be; none is empty."""
    n = len(weights)
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[k][i]: the lightest heaviest part when the first i weights make k parts, and where the last part begins.
    best = [[(sums[i], 0) for i in range(n + 1)]]
    for k in range(1, n_parts):
        row = [(float("inf"), 0)] * (n + 1)
        for i in range(k + 1, n + 1):
            row[i] = min((max(best[k - 1][j][0], sums[i] - sums[j]), j) for j in range(k, i))
        best.append(row)
    starts, i = [], n
    for k in range(n_parts - 1, 0, -1):
        i = best[k][i][1]
        starts.append(i)
    return starts[::-1]


# Candidates


def _longest_list(model: nnx.Module, n_stages: int) -> tuple[list[str], list[nnx.Module]]:
    """Names and modules of the longest list, each module once."""
    lists = [
        ([*map(str, path)], _layers(found))
        for path, found in nnx.iter_modules(model)
        if isinstance(found, nnx.List)
    ]
    path, layers = max(lists, key=lambda found: len(found[1]), default=([], {}))
    if len(layers) < n_stages:
        list_is = f"is {'.'.join(path)} with {len(layers)} modules" if layers else "is missing"
        raise ParallelizeError(
            f"pipeline: n_stages={n_stages}, but the longest list of modules in {type(model).__name__} {list_is}. Write "
            f"n_stages={max(len(layers), 1)} or fewer, or say where to cut: split_spec={{'<module>': 'beginning'}}."
        )
    return [".".join([*path, str(i)]) for i in layers], list(layers.values())


def _layers(found: nnx.List) -> dict[int, nnx.Module]:
    """Modules by position; functions among them (`jax.nn.relu`) stay with the module before them."""
    layers: dict[int, nnx.Module] = {}
    for i, module in enumerate(found):
        is_new = all(module is not known for known in layers.values())
        if isinstance(module, nnx.Module) and callable(module) and is_new:
            layers[i] = module
    return layers


def _check_number(names: Sequence[str], n_stages: int, balance: Balance) -> None:
    if len(names) < n_stages:
        raise ParallelizeError(
            f"pipeline: n_stages={n_stages}, but for balance={balance!r} the sample showed only {len(names)} modules that do "
            f"something and are called in plain Python (not in jax.lax.scan, jax.lax.cond or jax.checkpoint): {list(names)}. "
            f"Write n_stages={len(names)} or fewer, or say where to cut: split_spec={{'<module>': 'beginning'}}."
        )


# Weights


def _num_parameters(module: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(module, nnx.Param)))


def _weighed(
    model: nnx.Module, names: list[str], sample: Sample, *, is_timed: bool
) -> tuple[list[str], list[float]]:
    """The modules between which a cut makes sense, and what the program does from each to the next.

    The first also has what comes before it (an embedding), the last what comes after (a head, the loss). A module without
    work of its own (a dropout that is off) belongs to the one before it.
    """
    graphdef, state = nnx.split(model)
    variables, treedef = jax.tree.flatten(state)
    batch, structure = jax.tree.flatten(sample[1])
    if is_timed and any(isinstance(x, jax.ShapeDtypeStruct) for x in (*variables, *batch)):
        raise ParallelizeError(
            'pipeline: balance="time" runs the modules, and the model or the sample is abstract (jax.ShapeDtypeStruct). '
            'Write balance="flops", or give arrays.'
        )

    def traced(names: Sequence[str]) -> Any:
        def whole(*flat: Any) -> list[Any]:
            merged = nnx.merge(graphdef, jax.tree.unflatten(treedef, flat[: len(variables)]))
            mark_splits(merged, tuple((name, "beginning") for name in names[1:]), _nothing)
            out = sample[0](merged, jax.tree.unflatten(structure, flat[len(variables) :]))
            return [jnp.asarray(x) for x in jax.tree.leaves(out)]

        return trace(whole, *variables, *batch)

    closed = traced(names)
    reached = {_compat.marked_stage(equation) for equation in closed.jaxpr.eqns}
    found = [name for i, name in enumerate(names) if i == 0 or i in reached]
    closed = closed if len(found) == len(names) else traced(found)
    is_state = [i < len(variables) for i in range(len(closed.jaxpr.invars))]
    pieces = cut(closed, is_state, len(found), may_idle=True)
    weights: list[float] = [num_flops(piece.program.jaxpr) for piece in pieces]
    working = [i for i, weight in enumerate(weights) if weight or i == 0]
    if is_timed:
        # Clocks of several processes differ, and all must cut alike.
        weights = broadcast_object(_seconds(pieces, [*variables, *batch]))
        weights = [sum(weights[i:j]) for i, j in zip(working, [*working[1:], len(found)], strict=True)]
    else:
        weights = [weights[i] for i in working]
    return [found[i] for i in working], weights


def _nothing() -> None:
    pass


def _seconds(pieces: Sequence[Piece], inputs: Sequence[Any]) -> list[float]:
    """Seconds of forward and backward of each piece; pieces with the same program are compiled and timed once."""
    known: dict[str, float] = {}
    seconds, received = [], []
    for piece in pieces:
        values = [*(inputs[i] for i in piece.reads), *received]
        text = str(piece.program.jaxpr)
        run = jax.jit(_forward_and_backward(piece))
        if text not in known:
            known[text] = _fastest(lambda run=run, values=values: run(*values))
        seconds.append(known[text])
        received = _compat.as_function(piece.program.jaxpr, piece.program.consts)(*values)[: piece.num_sent]
    return seconds


def _forward_and_backward(piece: Piece) -> Callable[..., Any]:
    """All outputs of a piece, and the gradients of its floating inputs."""
    forward = _compat.as_function(piece.program.jaxpr, piece.program.consts)

    def run(*values: Any) -> Any:
        def of_floating(floating: list[Any]) -> Any:
            left = iter(floating)
            outputs = forward(*(next(left) if is_floating(x) else x for x in values))
            return [x for x in outputs if is_floating(x)], outputs

        outputs, pullback, everything = jax.vjp(of_floating, list(filter(is_floating, values)), has_aux=True)
        return everything, pullback([jnp.ones_like(x) for x in outputs])

    return run


def _fastest(run: Callable[[], Any]) -> float:
    """Seconds from call to result; a first run compiles."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(_NUM_RUNS):
        start_s = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)
