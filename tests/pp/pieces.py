"""Programs in pieces, for the tests of the cut: how they are made, put together again, and looked into."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxpar import _compat
from jaxpar.pp._cut import Piece, cut
from jaxpar.pp._inline import trace

mark = _compat.mark_stage


def pieces_of(
    fn: Callable[..., list[Any]],
    state: Sequence[Any],
    batch: Sequence[Any],
    n_stages: int,
    updates: Sequence[tuple[int, int]] = (),
) -> tuple[Piece, ...]:
    is_state = [True] * len(state) + [False] * len(batch)
    return cut(trace(fn, *state, *batch), is_state, n_stages, updates)


def composed(pieces: Sequence[Piece], inputs: Sequence[Any]) -> list[Any]:
    """Run the pieces one after the other."""
    results, received = {}, []
    for piece in pieces:
        run = _compat.as_function(piece.program.jaxpr, piece.program.consts)
        assert len(received) == piece.num_received
        outputs = run(*(inputs[i] for i in piece.reads), *received)
        received = outputs[: piece.num_sent]
        results |= dict(zip(piece.results, outputs[piece.num_sent :], strict=True))
    return [results[i] for i in sorted(results)]


def homes(pieces: Sequence[Piece]) -> dict[int, list[int]]:
    """The stages in which each computation is done, by its constant."""
    found = collections.defaultdict(list)
    for stage, piece in enumerate(pieces):
        for equation in piece.program.jaxpr.eqns:
            constants = [a for a in equation.invars if _compat.is_literal(a)]
            if equation.primitive.name == "mul" and constants:
                found[int(constants[0].val)].append(stage)
    return dict(found)


def sent(pieces: Sequence[Piece]) -> list[list[str]]:
    """Types of what each stage sends."""
    return [[str(v.aval) for v in piece.program.jaxpr.outvars[: piece.num_sent]] for piece in pieces]


x, w = jnp.arange(1.0, 4.0), jnp.array([2.0, 3.0, 5.0])
