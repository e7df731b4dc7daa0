"""Exact attention over a ring of ranks, with a backward that goes round the ring again.

Queries stay, keys and values travel. At step s rank r meets those of rank r-s (mod c):

    forward     step 0      own keys; meanwhile the first hop
                step s      keys of r-s; meanwhile the hop that step s+1 needs
    backward    first half of step 0, then steps 1 to c-1 as above, then the rest of step 0;
                dk, dv of rank j's keys start at rank j+1 and travel with the ring: c-1 hops bring them home,
                each while the next step is computed, the last one under the rest of step 0

Saved for the backward: q, k, v, the output and the log-sum-exp, this rank's rows only (arXiv 2310.01889, 2307.08691).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar._after import copy_after, number_of, wait_for
from jaxpar._compat import varying_axes
from jaxpar.cp._axis import rank_on
from jaxpar.cp._blocks import from_blocks, to_blocks
from jaxpar.cp._softmax import Keys, Rows, Running, finish, nothing_seen, see, see_backward, statistics_dtype
from jaxpar.cp._visits import Schedule, Visits
from jaxpar.mesh import all_gather, ring_shift
from jaxpar.mesh._collectives_axes import to_varying

Rotate = Literal["allgather", "ppermute"]
Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]
Carry = TypeVar("Carry")


@dataclass(frozen=True)
class Ring:
    """Everything about a call that is known before its arrays: hashable, so that it can steer a `custom_vjp`."""

    axis: str
    rotate: Rotate
    scale: float
    schedule: Schedule

    @property
    def rank(self) -> jax.Array | int:
        """This device's position on the ring."""
        return rank_on(self.axis, self.schedule.ranks)

    def round(self, keys: Keys, step: Callable[[Keys, Visits, Carry], Carry], carry: Carry) -> Carry:
        """Steps 1 to c-1: `carry = step(keys of another rank, what is seen of them, carry)`."""
        ranks, rank = self.schedule.ranks, self.rank
        whole = None
        if self.rotate == "allgather" and ranks > 1:
            whole = all_gather(keys, self.axis, tiled=False)
        for hop in range(1, ranks):
            source = (rank - hop) % ranks
            if whole is None:
                # The hop after this one leaves when the step before this one is done: two pairs of keys and values
                # are in memory at most.
                keys = ring_shift(keys, self.axis)
                keys = keys._replace(kv=wait_for(keys.kv, [number_of(jax.tree.leaves(carry))]))
            else:
                keys = jax.tree.map(
                    lambda x, at=source: lax.dynamic_index_in_dim(x, at, keepdims=False), whole
                )
            carry = step(keys, self.schedule.met(rank, source), carry)
        return carry


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

    def step(keys: Keys, visits: Visits, running: Running) -> Running:
        return see(running, rows, own.segments, keys, visits, ring.scale)

    running = step(own, ring.schedule.own(), _like(q, nothing_seen(rows)))
    out_blocks, lse = finish(ring.round(own, step, running))
    out = from_blocks(out_blocks, dim=-2).reshape(q.shape).astype(q.dtype)
    return out, (q, k, v, segments, out, from_blocks(lse, dim=-1))


def _backward(ring: Ring, saved: Saved, dout: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, segments, out, lse = saved
    # Else XLA takes the forward's blocks and hops for those of the backward, the same, and keeps them in between.
    q, k, v = (copy_after(x, [number_of([out, dout])]) for x in (q, k, v))
    keys = _key_blocks(ring, k, v, segments)
    dtype = statistics_dtype(q.dtype)
    delta = (dout.astype(dtype) * out.astype(dtype)).sum(-1).reshape(lse.shape)
    num_blocks = ring.schedule.num_blocks
    rows = Rows(
        _row_blocks(ring, q, k),
        _row_blocks(ring, dout, k),
        to_blocks(lse, num_blocks, dim=-1),
        to_blocks(delta, num_blocks, dim=-1),
        keys.segments,
    )
    no_dkv = _like(q, jnp.zeros(keys.kv.shape, dtype))

    def step(met: Keys, visits: Visits, carry: _Grads) -> _Grads:
        dq, travelling = carry
        dq, dkv = see_backward((dq, no_dkv), rows, met, visits, ring.scale)
        return dq, dkv if travelling is None else ring_shift(travelling, ring.axis) + dkv

    own, half = ring.schedule.own(), len(ring.schedule.own().rows) // 2
    dq = _like(q, jnp.zeros(rows.q.shape, dtype))
    dq, own_dkv = see_backward((dq, no_dkv), rows, keys, own.part(0, half), ring.scale)
    dq, travelling = ring.round(keys, step, (dq, None))
    dq, own_dkv = see_backward((dq, own_dkv), rows, keys, own.part(half, len(own.rows)), ring.scale)
    dkv = own_dkv if travelling is None else ring_shift(travelling, ring.axis) + own_dkv
    dk, dv = from_blocks(dkv, dim=-2)
    dq = from_blocks(dq, dim=-2).reshape(q.shape)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)
_Grads = tuple[jax.Array, jax.Array | None]


def _row_blocks(ring: Ring, q: jax.Array, k: jax.Array) -> jax.Array:
    """f32[..., H, L, E] -> f32[N, ..., K, G, R, E]."""
    *batch, heads, length, features = q.shape
    groups = q.reshape(*batch, k.shape[-3], heads // k.shape[-3], length, features)
    return to_blocks(groups, ring.schedule.num_blocks, dim=-2)


def _key_blocks(ring: Ring, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> Keys:
    num_blocks = ring.schedule.num_blocks
    kv = to_blocks(jnp.stack([k, v]), num_blocks, dim=-2)
    return Keys(kv, None if segments is None else to_blocks(segments, num_blocks, dim=-1))


def _like(q: jax.Array, start: Carry) -> Carry:
    """What a loop starts with, typed as varying like `q`."""
    names = tuple(sorted(varying_axes(jax.typeof(q))))
    return jax.tree.map(lambda x: to_varying(x, names), start)
