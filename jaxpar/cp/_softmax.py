r"""Attention block by block, with the softmax kept as running sums, and its gradient from the log-sum-exp alone.

Shapes: N blocks of R rows, K key/value heads, each shared by G query heads, E features.

Forward, for a block of scores s = scale q k^T (-inf where masked), with peak m, total l, output o so far:

    m' = max(m, max_n s)      p = e^(s - m')      l' = e^(m - m') l + sum_n p      o' = e^(m - m') o + p v

At the end out = o / l and lse = m + log l. Merging blocks in any order gives the softmax over all of them.
Backward, from out and lse, with delta = sum_e dout out:

    p = e^(s - lse)      dv = p^T dout      ds = p (dout v^T - delta) scale      dq = ds k      dk = ds^T q

So nothing of size rows x keys outlives its block (arXiv 2205.14135). A row that sees no key has l = 0: its output is
zero, and lse = +inf makes every p of its backward zero.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.cp._blocks import put, take
from jaxpar.cp._visits import Visits


class Keys(NamedTuple):
    """What travels: keys and values in one array, and their segments.

    Attributes:
        kv: f32[N, 2, ..., K, R, E].
        segments: i32[N, ..., R], or None.
    """

    kv: jax.Array
    segments: jax.Array | None


class Running(NamedTuple):
    """The softmax so far of each query: o f32[N, ..., K, G, R, E], m and l f32[N, ..., K, G, R]."""

    out: jax.Array
    peak: jax.Array
    total: jax.Array


class Rows(NamedTuple):
    """What stays at home in the backward.

    Attributes:
        q: f32[N, ..., K, G, R, E].
        dout: as q.
        lse: f32[N, ..., K, G, R].
        delta: as lse.
        segments: i32[N, ..., R], or None.
    """

    q: jax.Array
    dout: jax.Array
    lse: jax.Array
    delta: jax.Array
    segments: jax.Array | None


def statistics_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float64 for float64, float32 for everything else."""
    return jnp.promote_types(dtype, jnp.float32)


def nothing_seen(q: jax.Array) -> Running:
    """The state before the first block; `q` f32[N, ..., K, G, R, E]."""
    dtype = statistics_dtype(q.dtype)
    # A finite peak, so that e^(m - m') is never e^(-inf + inf).
    peak = jnp.full(q.shape[:-1], jnp.finfo(dtype).min, dtype)
    return Running(jnp.zeros(q.shape, dtype), peak, jnp.zeros(q.shape[:-1], dtype))


@functools.partial(jax.jit, static_argnames="scale")  # traced once for all steps and layers
def see(
    running: Running, q: jax.Array, segments: jax.Array | None, keys: Keys, visits: Visits, *, scale: float
) -> Running:
    """Takes the visited blocks of keys into the softmax of the visited blocks of queries."""

    def visit(running: Running, at: Visits) -> tuple[Running, None]:
        mine, q_rows = take((running, q), at.rows)
        k, v = take(keys.kv, at.keys)
        scores = _scores(q_rows, k, scale, _visible(at, segments, keys.segments, q_rows.shape[-2]))
        return put(running, at.rows, _seen(mine, scores, v)), None

    return lax.scan(visit, running, visits)[0]


def finish(running: Running) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the log-sum-exp of all scores; zero and +inf for a row that has seen no key."""
    total = jnp.where(running.total == 0, 1, running.total)
    lse = jnp.where(running.total == 0, jnp.inf, running.peak + jnp.log(total))
    return running.out / total[..., None], lse


@functools.partial(jax.jit, static_argnames="scale")
def see_backward(
    grads: tuple[jax.Array, jax.Array], rows: Rows, keys: Keys, visits: Visits, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Adds the gradients of the visited blocks to `grads`: dq as q, dkv as kv, in the dtype of the statistics."""

    def visit(grads: tuple[jax.Array, jax.Array], at: Visits) -> tuple[tuple[jax.Array, jax.Array], None]:
        q, dout, lse, delta = take((rows.q, rows.dout, rows.lse, rows.delta), at.rows)
        k, v = take(keys.kv, at.keys)
        scores = _scores(q, k, scale, _visible(at, rows.segments, keys.segments, q.shape[-2]))
        p = jnp.exp(scores - lse[..., None])
        ds = (p * (_dot("...kgre,...kne->...kgrn", dout, v) - delta[..., None]) * scale).astype(q.dtype)
        dk = _dot("...kgrn,...kgre->...kne", ds, q)
        dv = _dot("...kgrn,...kgre->...kne", p.astype(dout.dtype), dout)
        dq = put(grads[0], at.rows, take(grads[0], at.rows) + _dot("...kgrn,...kne->...kgre", ds, k))
        dkv = put(grads[1], at.keys, take(grads[1], at.keys) + jnp.stack([dk, dv]))
        return (dq, dkv), None

    return lax.scan(visit, grads, visits)[0]


def _seen(mine: Running, scores: jax.Array, v: jax.Array) -> Running:
    peak = jnp.maximum(mine.peak, scores.max(-1))
    p, shrink = jnp.exp(scores - peak[..., None]), jnp.exp(mine.peak - peak)
    out = mine.out * shrink[..., None] + _dot("...kgrn,...kne->...kgre", p.astype(v.dtype), v)
    return Running(out, peak, mine.total * shrink + p.sum(-1))


def _scores(q: jax.Array, k: jax.Array, scale: float, visible: jax.Array | None) -> jax.Array:
    scores = _dot("...kgre,...kne->...kgrn", q, k) * scale
    return scores if visible is None else jnp.where(visible, scores, -jnp.inf)


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=statistics_dtype(a.dtype))


def _visible(
    at: Visits, row_segments: jax.Array | None, key_segments: jax.Array | None, block: int
) -> jax.Array | None:
    """bool[..., 1, 1, R, R], which keys each query of the block may see; None if all."""
    visible = None
    if at.offsets is not None:
        position = jnp.arange(block, dtype=jnp.int32)
        visible = position[:, None] + at.offsets >= position
    if row_segments is not None and key_segments is not None:
        mine, theirs = take(row_segments, at.rows), take(key_segments, at.keys)
        same = (mine[..., :, None] == theirs[..., None, :])[..., None, None, :, :]
        visible = same if visible is None else same & visible
    return visible
