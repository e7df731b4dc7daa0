"""`ColwiseParallel`: a layer split by its outputs (Megatron's column-parallel linear).

x whole --> y[:, part r] = x @ W[:, part r] + b[part r]        forward: nothing     backward of x: all-reduce
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._module import vary, varying_axes
from jaxpar.mesh import MeshLike, Partial, Placement, Replicate, Shard, axis_size
from jaxpar.tp._collective_matmul import all_gather_matmul
from jaxpar.tp._convert import convert, slice_of, to_whole
from jaxpar.tp._parameters import Cut, add_bias, check_overlap, columns_of, promoted
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
class ColwiseParallel(ParallelStyle):
    """Splits a layer by its outputs: each rank of the axis computes 1/n of the columns.

        input Replicate (default)    forward: nothing moves    backward: all-reduce of the input's gradient
        input Shard(d)               forward: all-gather       backward: reduce-scatter

    Layers that read the same array share that one collective (`gate` and `up`; `q`, `k` and `v`).

    On `nnx.Linear` (kernel `f32[D, F@tp]`, bias `f32[F@tp]`), `nnx.LinearGeneral` (first output dim), `nnx.Einsum` (first
    new letter), `nnx.Conv` (output channels), `nnx.Embed` (features; its `attend` then ends in an all-reduce).

    Args:
        axis: the mesh axis; default the only one that `parallelize_module` was given.
        input_layouts: how the first argument lies; default `Replicate()`.
        output_layouts: how the output is to lie; default `Shard(-1)`, as computed.
        heads: number of heads that the columns consist of, so that none is cut: they must divide by the ranks.
        replicate_heads: fewer heads than ranks are allowed if the ranks are a multiple of them (key/value heads of
            grouped-query attention): the parameters stay whole, and rank r computes head r * heads // ranks.
        overlap: for `nnx.Linear` with input `Shard(d)`: gather in steps, each under the matmul of the step before
            (`jaxpar.tp.all_gather_matmul`). Equal in value. Layers that read the same array then gather it each.

    Source: `torch.distributed.tensor.parallel.ColwiseParallel`, row T2; Megatron-LM (arXiv 1909.08053).

    Example:
        >>> from flax import nnx
        >>> from jaxpar.mesh import init_device_mesh
        >>> from jaxpar.tp import ColwiseParallel, parallelize_module
        >>> model = nnx.Sequential(nnx.Linear(4, 16, rngs=nnx.Rngs(0)))
        >>> model = parallelize_module(model, init_device_mesh((8,), ("tp",)), {"layers.0": ColwiseParallel()})
        >>> model.layers[0].kernel.sharding.shard_shape((4, 16))
        (4, 2)
    """

    input_layouts: Placement = Replicate()
    output_layouts: Placement | None = None
    heads: int | None = None
    replicate_heads: bool = False
    overlap: bool = False

    def apply(self, name: str, module: Any, mesh: MeshLike) -> None:
        assert self.axis is not None
        columns = columns_of(name, module)
        if self.overlap:
            check_overlap(name, module, "input_layouts", self.input_layouts)
        style = self
        if self._is_replicated(name, mesh):
            if self.overlap:
                raise ParallelizeError(
                    f"parallelize_module: {name} has heads={self.heads}, fewer than there are ranks of {self.axis!r}, so its parameters "
                    f"stay whole, and overlap=True is for split ones. Drop overlap from this layer."
                )
            mark_partial_sums(module, self.axis, tuple(cut.name for cut in columns.cuts))
        else:
            split_parameters(name, module, columns.cuts, self.axis, mesh)
            style = dataclasses.replace(self, heads=None)
        if isinstance(module, nnx.Embed):
            bind(name, module, style, _run_embed, methods=("__call__", "attend"))
        else:
            bind(name, module, style, _run)

    def _is_replicated(self, name: str, mesh: MeshLike) -> bool:
        """Whether there are fewer heads than ranks; checks that no head is cut."""
        assert self.axis is not None
        num_ranks = axis_size(mesh, self.axis)
        if self.heads is None or self.heads % num_ranks == 0:
            return False
        if self.replicate_heads and num_ranks % self.heads == 0:
            return True
        also = " (or divide them, with replicate_heads=True)" if self.replicate_heads else ""
        raise ParallelizeError(
            f"parallelize_module: {name} has {self.heads} heads, which do not divide by {self.axis}={num_ranks} ranks{also}: "
            f"{self.heads} % {num_ranks} = {self.heads % num_ranks}, and a head that is cut computes another attention. Take a "
            f"{self.axis!r} axis that divides {self.heads}; key/value heads of their own layers may be replicated: "
            f"ColwiseParallel(heads={self.heads}, replicate_heads=True)."
        )


def _run(bound: Bound, original: Any, module: Any, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    style: ColwiseParallel = bound.style
    if style.overlap:
        return _run_overlapped(bound, module, x)
    columns = columns_of(bound.name, module)
    x = to_whole(x, style.input_layouts, bound.axis, bound.where)
    check_input(bound, x, columns.reads)
    with _own_head(style, module, columns.cuts, bound.axis), without_bias(module) as bias:
        y = original(x, *args, **kwargs)
        y = y if bias is None else add_bias(module, bias.get_value(), y)
    mine = Shard(columns.dim)
    return convert(y, mine, style.output_layouts or mine, bound.axis, bound.where)


def _run_overlapped(bound: Bound, module: nnx.Linear, x: jax.Array) -> jax.Array:
    style: Any = bound.style
    x, kernel = promoted(module, x)
    check_input(bound, x, {-1: module.in_features})
    y = all_gather_matmul(
        x, kernel, bound.axis, dim=style.input_layouts.dim % x.ndim, precision=module.precision
    )
    y = y if module.bias is None else add_bias(module, module.bias.get_value(), y)
    return convert(y, Shard(-1), style.output_layouts or Shard(-1), bound.axis, bound.where)


def _run_embed(bound: Bound, original: Any, module: nnx.Embed, x: jax.Array, *args: Any) -> jax.Array:
    """`__call__`: this rank's features of the rows. `attend`: products over this rank's features, summed."""
    style: ColwiseParallel = bound.style
    if original.func.__name__ == "attend":
        mine = x if bound.axis in varying_axes(x) else slice_of(x, x.ndim - 1, bound.axis, bound.where)
        return convert(original(mine, *args), Partial(), Replicate(), bound.axis, bound.where)
    ids = to_whole(x, style.input_layouts, bound.axis, bound.where)
    y = original(ids, *args)
    return convert(y, Shard(-1), style.output_layouts or Shard(-1), bound.axis, bound.where)


@contextlib.contextmanager
def _own_head(style: ColwiseParallel, module: Any, cuts: Sequence[Cut], axis: str) -> Iterator[None]:
    """Within the block replicated parameters are the columns of this rank's head."""
    if style.heads is None:
        yield
        return
    head = jax.lax.axis_index(axis) * style.heads // jax.lax.axis_size(axis)
    variables = [getattr(module, cut.name) for cut in cuts]
    whole = [variable.get_value() for variable in variables]
    try:
        for variable, x, cut in zip(variables, whole, cuts, strict=True):
            size = x.shape[cut.dim] // style.heads
            part = jax.lax.dynamic_slice_in_dim(vary(x, (axis,)), head * size, size, cut.dim)
            variable.set_value(part)
        yield
    finally:
        for variable, x in zip(variables, whole, strict=True):
            variable.set_value(x)
