"""Exact attention over a ring of ranks, with a backward that goes round the ring again.

Queries stay, keys and values travel:

    forward     step 0 (own keys), then steps 1 to c-1
    backward    half of step 0, steps 1 to c-1, the rest of step 0; the gradients of rank j's keys and values start
                at rank j+1 and travel with the ring: c-1 hops bring them home, each under the step that follows,
                the last one under the rest of step 0

Saved for the backward: q, k, v, the output and the log-sum-exp, this rank's rows only (arXiv 2310.01889, 2307.08691).
"""

import functools

import jax
import jax.numpy as jnp

from jaxpar._after import copy_after, number_of, wait_for
from jaxpar._compat import varying_axes
from jaxpar._pytree import PyTree
from jaxpar.cp._blocks import from_blocks, to_blocks
from jaxpar.cp._ring import Ring
from jaxpar.cp._softmax import Keys, Rows, Running, finish, nothing_seen, see, see_backward
from jaxpar.cp._visits import Visits
from jaxpar.mesh import ring_shift
from jaxpar.mesh._collectives_axes import to_varying

Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]
Grads = tuple[jax.Array, jax.Array | None]


def attend(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Attention of checked arrays: q f32[..., H, L, E], k and v f32[..., K, L, E], segments i32[..., L] or None."""
    arrays = [x for x in (q, k, v, segments) if x is not None]
    # A gradient has the type of what it is the gradient of, so all that meet here vary over the same axes.
    axes = set().union(*(varying_axes(jax.typeof(x)) for x in arrays))
    names = tuple(sorted(axes | ({ring.axis} if ring.schedule.ranks > 1 else set())))
    q, k, v = (to_varying(x, names) for x in (q, k, v))
    return _attend(ring, q, k, v, None if segments is None else to_varying(segments, names))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    return _forward(ring, q, k, v, segments)[0]


def _forward(
    ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None
) -> tuple[jax.Array, Saved]:
    rows, own = _row_blocks(ring, q, k), _key_blocks(ring, k, v, segments)
    segment_blocks = _segment_blocks(ring, segments, padding=-2)

    def step(keys: Keys, visits: Visits, running: Running) -> Running:
        return see(running, rows, segment_blocks, keys, visits, scale=ring.scale)

    running = step(own, ring.schedule.own(), _like(q, nothing_seen(rows)))
    out_blocks, lse = finish(ring.round(own, step, running))
    out = from_blocks(out_blocks, dim=-2).reshape(q.shape).astype(q.dtype)
    return out, (q, k, v, segments, out, from_blocks(lse, dim=-1))


def _backward(ring: Ring, saved: Saved, dout: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, segments, out, lse = saved
    # Else XLA takes the forward's blocks and hops for those of the backward, the same, and keeps them in between.
    q, k, v = (copy_after(x, [number_of([out, dout])]) for x in (q, k, v))
    keys = _key_blocks(ring, k, v, segments)
    rows = _rows(ring, (q, k, v, segments, out, lse), dout)

    def step(met: Keys, visits: Visits, carry: Grads) -> Grads:
        dq, travelling = carry
        dq, dkv = see_backward((dq, _zeros_after(dq, keys.kv.shape)), rows, met, visits, scale=ring.scale)
        return dq, dkv if travelling is None else ring_shift(travelling, ring.axis) + dkv

    own = ring.schedule.own()
    first, rest = own.part(0, len(own.rows) // 2), own.part(len(own.rows) // 2, len(own.rows))
    nothing = jax.tree.map(lambda x: _like(q, jnp.zeros(x.shape, rows.delta.dtype)), (rows.q, keys.kv))
    dq, own_dkv = see_backward(nothing, rows, keys, first, scale=ring.scale)
    dq, travelling = ring.round(keys, step, (dq, None))
    dq, own_dkv = see_backward((dq, own_dkv), rows, keys, rest, scale=ring.scale)
    dkv = own_dkv if travelling is None else ring_shift(travelling, ring.axis) + own_dkv
    dk, dv = from_blocks(dkv, dim=-2)
    dq = from_blocks(dq, dim=-2).reshape(q.shape)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)


def _row_blocks(ring: Ring, q: jax.Array, k: jax.Array) -> jax.Array:
    """f32[..., H, L, E] -> f32[N, ..., K, G, R, E]."""
    *batch, heads, length, features = q.shape
    groups = q.reshape(*batch, k.shape[-3], heads // k.shape[-3], length, features)
    return to_blocks(groups, ring.schedule.num_blocks, dim=-2)


def _key_blocks(ring: Ring, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> Keys:
    kv = to_blocks(jnp.stack([k, v]), ring.schedule.num_blocks, dim=-2)
    return Keys(kv, _segment_blocks(ring, segments, padding=-1))


def _rows(ring: Ring, saved: Saved, dout: jax.Array) -> Rows:
    q, k, _, segments, out, lse = saved
    delta = (dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1).reshape(lse.shape)
    lse, delta = (to_blocks(x, ring.schedule.num_blocks, dim=-1) for x in (lse, delta))
    own_segments = _segment_blocks(ring, segments, padding=-2)
    return Rows(_row_blocks(ring, q, k), _row_blocks(ring, dout, k), lse, delta, own_segments)


def _segment_blocks(ring: Ring, segments: jax.Array | None, *, padding: int) -> jax.Array | None:
    """i32[..., L] -> i32[N, ..., R]. Padding has one id among queries and another among keys: it is never equal."""
    if segments is None:
        return None
    return to_blocks(jnp.where(segments < 0, padding, segments), ring.schedule.num_blocks, dim=-1)


def _like(q: jax.Array, start: PyTree) -> PyTree:
    """What a loop starts with, typed as varying like `q`."""
    names = tuple(sorted(varying_axes(jax.typeof(q))))
    return jax.tree.map(lambda x: to_varying(x, names), start)


def _zeros_after(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Zeros that are written only when `x` is known: else XLA writes those of all steps at the start."""
    one = wait_for(_like(x, jnp.ones((), x.dtype)), [number_of([x])])
    return jnp.broadcast_to(1 - one, shape)
