"""`RowwiseParallel`: a layer split by its inputs (Megatron's row-parallel linear).

    x[:, part r] --> y = sum over r of x[:, part r] @ W[part r] + b     forward: all-reduce     backward: nothing

The bias is added once, after the sum.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.mesh import MeshLike, Partial, Placement, Replicate, Shard
from jaxpar.tp._collective_matmul import matmul_reduce_scatter
from jaxpar.tp._convert import convert, to_whole
from jaxpar.tp._functional import only, own_rows
from jaxpar.tp._parameters import add_bias, check_overlap, promoted, rows_of
from jaxpar.tp._style import (
    Bound,
    ParallelStyle,
    bind,
    check_input,
    mark_partial_sums,
    split_parameters,
    without_bias,
)


@dataclass(frozen=True, kw_only=True)
class RowwiseParallel(ParallelStyle):
    """Splits a layer by its inputs: each rank of the axis computes a term of the sum.

        output Replicate (default)    forward: all-reduce        backward: nothing moves
        output Shard(d)               forward: reduce-scatter    backward: all-gather
        output Partial()              nothing moves: a `PrepareModuleOutput` of a module around sums

    On `nnx.Linear` (kernel `f32[F@tp, D]`, bias `f32[D]` whole), `nnx.LinearGeneral` (first summed dim), `nnx.Einsum` (first
    summed letter), `nnx.Conv` (input channels) and `nnx.Embed`, whose rows are split: each rank looks up the ids that it
    holds, the others give zeros, and the sum over ranks is the row. Its `attend` (a tied output layer) is split by
    columns: logits of this rank's rows.

    Args:
        axis: the mesh axis; default the only one that `parallelize_module` was given.
        input_layouts: how the first argument lies; default `Shard(-1)`, for `nnx.Embed` `Replicate()`.
        output_layouts: how the output is to lie; default `Replicate()`.
        attend_input_layouts: of `nnx.Embed.attend`: how its argument lies; default `Replicate()`.
        attend_output_layouts: of `nnx.Embed.attend`: how logits are to lie; default `Replicate()`. `Shard(-1)` leaves
            them as computed, for `jaxpar.tp.cross_entropy`.
        overlap: for `nnx.Linear` with output `Shard(d)`: reduce-scatter in steps, each under the matmul of the step before
            (`jaxpar.tp.matmul_reduce_scatter`). Equal in value.

    Source: `torch.distributed.tensor.parallel.RowwiseParallel`, row T3; Megatron-LM (arXiv 1909.08053).

    Example:
        >>> from flax import nnx
        >>> from jaxpar.mesh import init_device_mesh
        >>> from jaxpar.tp import RowwiseParallel, parallelize_module
        >>> model = nnx.Sequential(nnx.Linear(16, 4, rngs=nnx.Rngs(0)))
        >>> model = parallelize_module(model, init_device_mesh((8,), ("tp",)), {"layers.0": RowwiseParallel()})
        >>> model.layers[0].kernel.sharding.shard_shape((16, 4))
        (2, 4)
    """

    input_layouts: Placement | None = None
    output_layouts: Placement = Replicate()
    attend_input_layouts: Placement = Replicate()
    attend_output_layouts: Placement = Replicate()
    overlap: bool = False

    def apply(self, name: str, module: Any, mesh: MeshLike) -> None:
        assert self.axis is not None
        if self.overlap:
            check_overlap(name, module, "output_layouts", self.output_layouts)
        split_parameters(name, module, rows_of(name, module).cuts, self.axis, mesh)
        if isinstance(module, nnx.Embed):
            bind(name, module, self, _run_embed, methods=("__call__", "attend"))
            return
        if isinstance(self.output_layouts, Shard) and getattr(module, "bias", None) is not None:
            mark_partial_sums(module, self.axis, ("bias",))  # added to this rank's part of the output
        bind(name, module, self, _run)


def _run(bound: Bound, original: Any, module: Any, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    style: RowwiseParallel = bound.style
    rows = rows_of(bound.name, module)
    mine = Shard(rows.dim)
    x = convert(x, style.input_layouts or mine, mine, bound.axis, bound.where)
    check_input(bound, x, {rows.dim: rows.size // jax.lax.axis_size(bound.axis)})
    with without_bias(module) as bias:
        y = _product(bound, module, x) if style.overlap else original(x, *args, **kwargs)
    y = y if style.overlap else convert(y, Partial(), style.output_layouts, bound.axis, bound.where)
    if bias is None:
        return y
    if isinstance(style.output_layouts, Partial):
        first = jax.lax.axis_index(bound.axis) == 0
        return jnp.where(first, add_bias(module, bias.get_value(), y), y)  # once, when others sum
    return add_bias(module, bias.get_value(), y)


def _product(bound: Bound, module: nnx.Linear, x: jax.Array) -> jax.Array:
    x, kernel = promoted(module, x)
    dim = bound.style.output_layouts.dim % x.ndim
    return matmul_reduce_scatter(
        x,
        kernel,
        bound.axis,
        dim=dim,
        precision=module.precision,
        preferred_element_type=module.preferred_element_type,
    )


def _run_embed(bound: Bound, original: Any, module: nnx.Embed, x: jax.Array, *args: Any) -> jax.Array:
    style: RowwiseParallel = bound.style
    if original.func.__name__ == "attend":
        query = to_whole(x, style.attend_input_layouts, bound.axis, bound.where)
        return convert(
            original(query, *args), Shard(-1), style.attend_output_layouts, bound.axis, bound.where
        )
    ids = to_whole(x, style.input_layouts or Replicate(), bound.axis, bound.where)
    local, is_mine = own_rows(ids, module.embedding.get_value().shape[0], bound.axis)
    found = only(is_mine, original(local, *args))
    return convert(found, Partial(), style.output_layouts, bound.axis, bound.where)
