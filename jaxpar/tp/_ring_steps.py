"""Two loops of t steps, each with one matmul and one hop to the next rank that travels under it.

    gather ring     step s: rank i has block i - s, multiplies it, and sends it on         t - 1 hops
    scatter ring    step s: rank i adds its product for block i - 1 - s and sends the sum  t - 1 hops

Steps are tied together, product of one step to block of the next. Untied, XLA sends all blocks first and joins the
matmuls, which share a weight, into one that waits for the last: at 8 H100s 5 % of the bytes travel under a matmul, tied
all of them (jax 0.10.2). The sum is kept apart from its product: jax 0.12 makes one matmul of both, which waits for the hop
(54 % of the bytes). `optimization_barrier` is enough here: XLA:GPU keeps it, and elsewhere nothing depends on it.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar._compat import varying_axes
from jaxpar.mesh._collectives_axes import ManualAxes, to_varying
from jaxpar.mesh._collectives_move import ring_shift

Matmul = Callable[[jax.Array, jax.Array], jax.Array]


def gather_ring(
    x: jax.Array, ws: Sequence[jax.Array], axes: ManualAxes, dim: int, matmul: Matmul
) -> tuple[list[jax.Array], jax.Array]:
    """The products of all ranks' blocks with each weight, and the blocks, each put together along `dim`.

    Args:
        x: f32[..., T/t, ..., D], this rank's block.
        ws: Weights that read it.
        axes: The ring.
        dim: Dim of the blocks.
        matmul: The product of a block and a weight; keeps all dims but the last.
    """
    rank, block = _rank(axes), x
    whole: list[jax.Array] = []
    for step in range(axes.num_ranks):
        parts = [block, *(matmul(block, w) for w in ws)]
        if step < axes.num_ranks - 1:
            block, *parts[1:] = lax.optimization_barrier((ring_shift(block, axes.names), *parts[1:]))
        whole = whole or [_room_for(part, axes, dim) for part in parts]
        start = (rank - step) % axes.num_ranks * x.shape[dim]
        whole = [_put(into, part, start, dim) for into, part in zip(whole, parts, strict=True)]
    return whole[1:], whole[0]


def scatter_ring(
    hs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    axes: ManualAxes,
    dim: int,
    matmul: Matmul,
) -> jax.Array:
    """This rank's block, along `dim`, of the sum of all ranks' products.

    Args:
        hs: f32[..., T, ..., F/t] each; all products are added.
        ws: As many weights.
        axes: The ring.
        dim: Dim that is scattered.
        matmul: As for `gather_ring`.
    """
    rank, num_ranks = _rank(axes), axes.num_ranks

    def blocks(step: int) -> list[jax.Array]:
        size = hs[0].shape[dim] // num_ranks
        start = (rank - 1 - step) % num_ranks * size
        return [lax.dynamic_slice_in_dim(h, start, size, dim) for h in hs]

    def product(of: Sequence[jax.Array]) -> jax.Array:
        first, *others = (matmul(h, w) for h, w in zip(of, ws, strict=True))
        return sum(others, first)

    total = product(blocks(0) if num_ranks > 1 else hs)
    for step in range(1, num_ranks):
        total, *own = lax.optimization_barrier((total, *blocks(step)))
        total, mine = lax.optimization_barrier((ring_shift(total, axes.names), product(own)))
        total += mine
    return total


def _rank(axes: ManualAxes) -> jax.Array | int:
    return axes.rank() if axes.wide else 0


def _room_for(part: jax.Array, axes: ManualAxes, dim: int) -> jax.Array:
    shape = (*part.shape[:dim], part.shape[dim] * axes.num_ranks, *part.shape[dim + 1 :])
    return to_varying(jnp.zeros(shape, part.dtype), tuple(sorted(varying_axes(jax.typeof(part)))))


def _put(into: jax.Array, part: jax.Array, start: jax.Array | int, dim: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(into, part, start, dim) if into.shape != part.shape else part
