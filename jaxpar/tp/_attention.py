"""`AttentionParallel`: the heads of an `nnx.MultiHeadAttention` are split over the ranks.

query, key, value    columns: heads of rank r          out    rows: the same heads, summed
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar.mesh import MeshLike, Placement, Replicate
from jaxpar.tp._colwise import ColwiseParallel
from jaxpar.tp._rowwise import RowwiseParallel
from jaxpar.tp._style import ParallelStyle


@dataclass(frozen=True, kw_only=True)
class AttentionParallel(ParallelStyle):
    """Splits an `nnx.MultiHeadAttention` by heads: one all-reduce forward and one backward.

        input Shard(1), output Shard(1)    all-gather + reduce-scatter, forward and backward (sequence parallel)

    Fewer key/value heads than ranks are replicated if the ranks are a multiple of them.

    Args:
        axis: the mesh axis; default the only one that `parallelize_module` was given.
        input_layouts: how queries, keys and values lie.
        output_layouts: how the output is to lie.

    Source: Megatron-LM (arXiv 1909.08053).

    Example:
        >>> from flax import nnx
        >>> from jaxpar.mesh import init_device_mesh
        >>> from jaxpar.tp import AttentionParallel, parallelize_module
        >>> attention = nnx.MultiHeadAttention(8, 32, decode=False, rngs=nnx.Rngs(0))
        >>> attention = parallelize_module(attention, init_device_mesh((8,), ("tp",)), AttentionParallel())
        >>> attention.query.kernel.sharding.shard_shape((32, 8, 4))
        (32, 1, 4)
    """

    input_layouts: Placement = Replicate()
    output_layouts: Placement = Replicate()

    def apply(self, name: str, module: Any, mesh: MeshLike) -> None:
        if not isinstance(module, nnx.MultiHeadAttention):
            raise ParallelizeError(
                f"parallelize_module: AttentionParallel does not handle {name}, which is {type(module).__name__}; it splits "
                f"nnx.MultiHeadAttention. Split another attention by its layers: ColwiseParallel(heads=...) on those that make "
                f"queries, keys and values, RowwiseParallel() on the last."
            )
        if module.dropout_rate > 0 and not module.broadcast_dropout:
            raise ParallelizeError(
                f"parallelize_module: {name} drops attention weights with a mask of its own for each head "
                f"(broadcast_dropout=False), drawn inside Flax: each rank would draw the masks of the first heads. Write "
                f"nnx.MultiHeadAttention(..., broadcast_dropout=True), Flax's default."
            )
        num_kv = getattr(module, "num_key_value_heads", None) or module.num_heads
        heads = {"query": module.num_heads, "key": num_kv, "value": num_kv}
        for child, num in heads.items():
            style = ColwiseParallel(
                axis=self.axis,
                input_layouts=self.input_layouts,
                heads=num,
                replicate_heads=child != "query" and num_kv < module.num_heads,
            )
            style.apply(f"{name}.{child}", getattr(module, child), mesh)
        RowwiseParallel(axis=self.axis, output_layouts=self.output_layouts).apply(
            f"{name}.out", module.out, mesh
        )
