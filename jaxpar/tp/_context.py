"""`ContextParallel`: the ranks of an axis share a sequence; the module that mixes positions becomes a ring.

q, k, v f32[B, H, T/c, E] of this rank's rows  -->  ring_attention  -->  f32[B, H, T/c, E]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._module import varying_axes
from jaxpar.cp import ring_attention, sequence_positions
from jaxpar.mesh import MeshLike
from jaxpar.tp._style import Bound, ParallelStyle, bind


@dataclass(frozen=True, kw_only=True)
class ContextParallel(ParallelStyle):
    """Makes an attention exact when each rank of the axis holds a part of the sequence (`jaxpar.cp.split_sequence`).

    On a module without parameters that is called as `core(q, k, v)` with `q f32[B, ..., T, E]` and `k, v f32[B, ..., T, E]`,
    whose dims in between are heads (queries of a group side by side): it becomes `jaxpar.cp.ring_attention`. If it has
    a method `positions(length)`, that gives the global positions of this rank's rows (for rotary embeddings). On an
    `nnx.MultiHeadAttention`: its `attention_fn` becomes the ring, causal if it is called with `is_causal=True`. Everything
    else of a transformer treats positions alone.

    Moves over the axis: keys and values forward and backward, and their gradients; see `ring_attention`.

    Args:
        axis: the mesh axis; default the only one that `parallelize_module` was given.
        causal: whether the module, as it computes elsewhere, lets a row see its own and earlier positions only.
        rotate: "allgather" or "ppermute".

    Source: `torch.distributed.tensor.experimental.context_parallel`, rows X1, X3; arXiv 2310.01889.

    Example:
        >>> from flax import nnx
        >>> from jaxpar.mesh import init_device_mesh
        >>> from jaxpar.tp import ContextParallel, parallelize_module
        >>> attention = nnx.MultiHeadAttention(8, 32, decode=False, rngs=nnx.Rngs(0))
        >>> attention = parallelize_module(attention, init_device_mesh((8,), ("cp",)), ContextParallel())
    """

    causal: bool = True
    rotate: Literal["allgather", "ppermute"] = "allgather"

    def apply(self, name: str, module: Any, mesh: MeshLike) -> None:
        del mesh
        if isinstance(module, nnx.MultiHeadAttention):
            if module.dropout_rate > 0:
                raise ParallelizeError(
                    f"parallelize_module: {name} drops attention weights (dropout_rate={module.dropout_rate}), which are never "
                    f"whole in a ring. Write nnx.MultiHeadAttention(..., dropout_rate=0.0), and drop its output."
                )
            if module.attention_fn is not nnx.dot_product_attention:
                raise ParallelizeError(
                    f"parallelize_module: {name} has an attention_fn of its own, {module.attention_fn!r}, and a ring computes "
                    f"softmax(q k^T) v, in its place. Leave attention_fn out and call the attention with is_causal=True or "
                    f"False."
                )
            bind(name, module, self, _run_flax)
            return
        if jax.tree.leaves(nnx.state(module, nnx.Param)) or not callable(module):
            raise ParallelizeError(
                f"parallelize_module: ContextParallel does not handle {name}, which is {type(module).__name__}. It is for "
                f"nnx.MultiHeadAttention, or for a module without parameters, called as core(q, k, v), which mixes positions."
            )
        methods = ("__call__", "positions") if hasattr(type(module), "positions") else ("__call__",)
        bind(name, module, self, _run_core, methods=methods)


def _run_core(bound: Bound, original: Any, module: Any, *args: Any) -> jax.Array:
    """`core(q, k, v)`, or `core.positions(length)` with the rows that this rank has."""
    del module
    if original.func.__name__ == "positions":
        return sequence_positions(args[0] * jax.lax.axis_size(bound.axis), bound.axis)
    flat = [x.reshape(x.shape[0], -1, *x.shape[-2:]) for x in args]
    return _ring(bound, flat, causal=bound.style.causal).reshape(args[0].shape)


def _run_flax(bound: Bound, original: Any, module: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """Flax calls `attention_fn` with f32[B, T, H, E]."""
    if kwargs.get("mask") is not None:
        raise ParallelizeError(
            f"{bound.where}: a mask for whole sequences was given; each rank has a part of them. Call it with is_causal=True and no "
            f"mask, or use jaxpar.cp.ring_attention with segment_ids."
        )

    def attention_fn(
        query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool = False, **_: Any
    ) -> jax.Array:
        heads_first = [x.swapaxes(-3, -2) for x in (query, key, value)]
        return _ring(bound, heads_first, causal=is_causal).swapaxes(-3, -2)

    attributes = vars(module)
    before = attributes["attention_fn"]
    try:
        attributes["attention_fn"] = attention_fn
        return original(*args, **kwargs)
    finally:
        attributes["attention_fn"] = before


def _ring(bound: Bound, qkv: Sequence[jax.Array], *, causal: bool) -> jax.Array:
    if bound.axis not in varying_axes(qkv[0]):
        raise ParallelizeError(
            f"{bound.where}: queries {qkv[0].dtype}{list(qkv[0].shape)} are the same on all ranks of {bound.axis!r}: nobody has split the "
            f"sequence, and every rank would take the whole for its part. Begin with x = jaxpar.cp.split_sequence(x, {bound.axis!r})."
        )
    q, k, v = qkv
    return ring_attention(q, k, v, bound.axis, causal=causal, rotate=bound.style.rotate)
