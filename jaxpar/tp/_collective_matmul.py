"""Matmuls whose collective travels under them: the all-gather before, or the reduce-scatter after, as a ring of steps.

    all_gather, then matmul     |== gather ==|######## matmul ########|
    all_gather_matmul           |## 0 ##|## 1 ##|## 2 ##|## 3 ##|        product of block 0, 1, 2, 3
                                |-- 1 --|-- 2 --|-- 3 --|                block that arrives meanwhile

Each is the other's backward. The bytes are those of the collective itself; they are hidden if a block's matmul takes
longer than its hop. Numbers of 2 bytes: if F/t is more than the chip's FLOP/s over the link's bytes/s, whatever the
number of tokens (600 TFLOP/s over 450 GB/s, an H100 in its host: 1,300 columns).
"""

from dataclasses import dataclass
from typing import overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxpar._compat import varying_axes
from jaxpar._errors import CollectiveError
from jaxpar.mesh._axes import AxisNames
from jaxpar.mesh._collectives_axes import ManualAxes, check_dim, check_divisible, manual_axes, to_varying
from jaxpar.tp._ring_steps import gather_ring, scatter_ring


@overload
def all_gather_matmul(
    x: jax.Array,
    ws: jax.Array,
    axis: AxisNames,
    *,
    dim: int,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array: ...


@overload
def all_gather_matmul(
    x: jax.Array,
    ws: tuple[jax.Array, ...],
    axis: AxisNames,
    *,
    dim: int,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> tuple[jax.Array, ...]: ...


def all_gather_matmul(
    x: jax.Array,
    ws: jax.Array | tuple[jax.Array, ...],
    axis: AxisNames,
    *,
    dim: int,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Gather `x` along a dim and multiply it with this rank's columns of weights, the gather under the matmuls.

        before   rank i: x f32[..., T/t, ..., D] (block i along dim),  w f32[D, F/t]   varying
        after    rank i: all_gather(x) @ w                f32[..., T, ..., F/t]         varying
        forward  t - 1 hops to the next rank, each under the matmul of the block that is there
        dual     matmul_reduce_scatter of the cotangents with w^T: t - 1 hops; the gathered x is kept for the gradient
                 of w, as a plain all_gather keeps it

    PyTorch: `_fused_all_gather_matmul` of asynchronous tensor parallel. Wang et al. 2023, "Overlap Communication with
    Dependent Computation via Decomposition". Each rank sends (t-1)/t of the gathered array, as a ring all-gather.

    Args:
        x: f32[..., T/t, ..., D], this rank's block.
        ws: f32[D, F/t], or a tuple of several that read the same x: one ring serves all.
        axis: Mesh axis, or several (ranks row-major).
        dim: Dim along which the blocks are joined; not the last, which is multiplied away.
        precision: Of the matmuls, as `jax.lax.dot_general`.
        preferred_element_type: As `jax.lax.dot_general`; the type of the results.

    Returns:
        f32[..., T, ..., F/t], or a tuple of as many as there are weights. Varying over the axis.

    Raises:
        CollectiveError: Outside shard_map, unknown axis, no such dim, the last dim, or a weight that does not fit x.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> from jaxpar.tp import all_gather_matmul
        >>> mesh = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
        >>> f = lambda x, w: all_gather_matmul(x, w, "tp", dim=0)
        >>> specs = dict(in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
        >>> jax.jit(jax.shard_map(f, mesh=mesh, **specs))(jnp.ones((8, 3)), jnp.ones((3, 12))).shape
        (8, 12)
    """
    where = "all_gather_matmul"
    ring, x, weights = _prepared(
        where, x, ws if isinstance(ws, tuple) else (ws,), axis, dim, precision, preferred_element_type
    )
    ys = _all_gather_matmul(ring, x, weights)
    return ys if isinstance(ws, tuple) else ys[0]


def matmul_reduce_scatter(
    h: jax.Array,
    w: jax.Array,
    axis: AxisNames,
    *,
    dim: int,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Multiply with this rank's rows of a weight, sum over the ranks and keep a block; the sums under the matmuls.

        before   rank i: h f32[..., T, ..., F/t],  w f32[F/t, D]                                varying
        after    rank i: block i along dim of sum_j h_j @ w_j      f32[..., T/t, ..., D]         varying
        forward  t - 1 hops to the next rank, each under the matmul of the block that goes next
        dual     all_gather_matmul of the cotangents with w^T: t - 1 hops

    PyTorch: `_fused_matmul_reduce_scatter` of asynchronous tensor parallel. Each rank sends (t-1)/t of the product, as a
    ring reduce-scatter; sums travel in the dtype of the product.

    Args:
        h: f32[..., T, ..., F/t].
        w: f32[F/t, D].
        axis: Mesh axis, or several (ranks row-major).
        dim: Dim that is scattered; its size must divide by the number of ranks. Not the last.
        precision: Of the matmuls, as `jax.lax.dot_general`.
        preferred_element_type: As `jax.lax.dot_general`; the type of the result, and of what travels.

    Returns:
        f32[..., T/t, ..., D]; varying over the axis.

    Raises:
        CollectiveError: Outside shard_map, unknown axis, no such dim, the last dim, a length that does not divide, or a
            weight that does not fit h.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.mesh import init_device_mesh
        >>> from jaxpar.tp import matmul_reduce_scatter
        >>> mesh = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
        >>> f = lambda h, w: matmul_reduce_scatter(h, w, "tp", dim=0)
        >>> specs = dict(in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"))
        >>> jax.jit(jax.shard_map(f, mesh=mesh, **specs))(jnp.ones((8, 12)), jnp.ones((12, 3))).shape
        (8, 3)
    """
    where = "matmul_reduce_scatter"
    ring, h, (w,) = _prepared(where, h, (w,), axis, dim, precision, preferred_element_type)
    check_divisible(where, "h", h, ring.dim, ring.axes)
    return _matmul_reduce_scatter(ring, h, w)


@dataclass(frozen=True)
class _Ring:
    """What the arrays do not say: the ring, the dim that is split over it, and how products are taken."""

    axes: ManualAxes
    dim: int
    precision: lax.PrecisionLike
    dtype: jnp.dtype | None

    def forward(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """f32[..., D] and f32[D, F] -> f32[..., F]."""
        return self._dot(x, w, ((x.ndim - 1,), (0,)))

    def backward(self, dy: jax.Array, w: jax.Array) -> jax.Array:
        """f32[..., F] and f32[D, F] -> f32[..., D], in the dtype of the input, which is the weight's."""
        return self._dot(dy, w, ((dy.ndim - 1,), (1,))).astype(w.dtype)

    def weight_grad(self, x: jax.Array, dy: jax.Array) -> jax.Array:
        """f32[..., D] and f32[..., F] -> f32[D, F]: one product over all tokens."""
        tokens = tuple(range(x.ndim - 1))
        return self._dot(x, dy, (tokens, tokens)).astype(x.dtype)

    def _dot(
        self, a: jax.Array, b: jax.Array, contracting: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> jax.Array:
        return lax.dot_general(
            a, b, (contracting, ((), ())), precision=self.precision, preferred_element_type=self.dtype
        )


Weights = tuple[jax.Array, ...]


def _gathered_products(ring: _Ring, x: jax.Array, ws: Weights) -> Weights:
    return _gather_forward(ring, x, ws)[0]


def _gather_forward(ring: _Ring, x: jax.Array, ws: Weights) -> tuple[Weights, tuple[jax.Array, Weights]]:
    ys, whole_x = gather_ring(x, ws, ring.axes, ring.dim, ring.forward)
    return tuple(ys), (whole_x, ws)


def _gather_backward(
    ring: _Ring, saved: tuple[jax.Array, Weights], dys: Weights
) -> tuple[jax.Array, Weights]:
    whole_x, ws = saved
    dx = scatter_ring(dys, ws, ring.axes, ring.dim, ring.backward)
    return dx, tuple(ring.weight_grad(whole_x, dy) for dy in dys)


_all_gather_matmul = jax.custom_vjp(_gathered_products, nondiff_argnums=(0,))
_all_gather_matmul.defvjp(_gather_forward, _gather_backward)


def _scattered_product(ring: _Ring, h: jax.Array, w: jax.Array) -> jax.Array:
    return scatter_ring((h,), (w,), ring.axes, ring.dim, ring.forward)


def _scatter_forward(
    ring: _Ring, h: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _scattered_product(ring, h, w), (h, w)


def _scatter_backward(
    ring: _Ring, saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    h, w = saved
    (dh,), whole_dy = gather_ring(dy, (w,), ring.axes, ring.dim, ring.backward)
    return dh, ring.weight_grad(h, whole_dy)


_matmul_reduce_scatter = jax.custom_vjp(_scattered_product, nondiff_argnums=(0,))
_matmul_reduce_scatter.defvjp(_scatter_forward, _scatter_backward)


def _prepared(
    where: str,
    x: jax.Array,
    ws: Weights,
    axis: AxisNames,
    dim: int,
    precision: lax.PrecisionLike,
    dtype: DTypeLike | None,
) -> tuple[_Ring, jax.Array, Weights]:
    """The checked ring, and arrays of one dtype that vary over the same axes, as their gradients will."""
    axes = manual_axes(where, axis)
    at = check_dim(where, "the input", dim, x.ndim)
    _check_shapes(where, x, ws, at)
    names = {*axes.names}.union(*(varying_axes(jax.typeof(each)) for each in (x, *ws)))
    common = jnp.result_type(x, *ws)
    x, *weights = (to_varying(each.astype(common), tuple(sorted(names))) for each in (x, *ws))
    ring = _Ring(axes, at, precision, None if dtype is None else jnp.dtype(dtype))
    return ring, x, tuple(weights)


def _check_shapes(where: str, x: jax.Array, ws: Weights, dim: int) -> None:
    if dim == x.ndim - 1:
        raise CollectiveError(
            f"{where}: dim={dim} is the last dim of the input {x.shape}, which the matmul multiplies away. Choose a dim "
            f"before it, such as the sequence: dim={max(dim - 1, 0)}."
        )
    if not ws:
        raise CollectiveError(f"{where}: no weight. Give at least one, f32[{x.shape[-1]}, ...].")
    for position, w in enumerate(ws):
        if w.ndim != 2 or w.shape[0] != x.shape[-1]:
            raise CollectiveError(
                f"{where}: weight {position} of shape {w.shape} does not fit the input {x.shape}: this rank multiplies "
                f"{x.shape[-1]} features, so the weight is f32[{x.shape[-1]}, ...], this rank's part of it. A kernel of "
                "more dims is given flat: w.reshape(rows, -1)."
            )
