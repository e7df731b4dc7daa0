"""`SequenceParallel`: a layer that treats every position alone, on this rank's part of the sequence.

x f32[B, T@tp, D] --> norm --> f32[B, T@tp, D]       nothing moves; gradients of its scale are summed over tp
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._module import varying_axes
from jaxpar.mesh import MeshLike, Replicate, Shard
from jaxpar.tp._convert import convert
from jaxpar.tp._style import Bound, ParallelStyle, bind, mark_partial_sums

KINDS = (nnx.LayerNorm, nnx.RMSNorm, nnx.Dropout)


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(ParallelStyle):
    """Runs a norm or dropout on this rank's part of the sequence: 1/n of its activations and work.

    Nothing moves in the forward. Each rank's gradient of the layer's own parameters is a term of a sum over the axis;
    `TrainStep` sums those of all layers at once, with the other gradients that are summed. An input that all ranks have is
    cut; one that differs between ranks is this rank's part already.

    Args:
        axis: the mesh axis; default the only one that `parallelize_module` was given.
        sequence_dim: the dim that is split. For an `nnx.Dropout` between a column- and a row-split layer, -1: masks
            then equal those of one device.

    Source: `torch.distributed.tensor.parallel.SequenceParallel`, row T4; arXiv 2205.05198.

    Example:
        >>> from flax import nnx
        >>> from jaxpar.mesh import init_device_mesh
        >>> from jaxpar.tp import SequenceParallel, parallelize_module
        >>> model = nnx.Sequential(nnx.RMSNorm(4, rngs=nnx.Rngs(0)))
        >>> model = parallelize_module(model, init_device_mesh((8,), ("tp",)), {"layers.*": SequenceParallel()})
        >>> type(model.layers[0]).__name__
        'TPRMSNorm'
    """

    sequence_dim: int = 1

    def apply(self, name: str, module: Any, mesh: MeshLike) -> None:
        del mesh
        assert self.axis is not None
        if not isinstance(module, KINDS):
            raise ParallelizeError(
                f"parallelize_module: SequenceParallel does not handle {name}, which is {type(module).__name__}. It is for layers "
                f"that treat each position alone: {', '.join(f'nnx.{kind.__name__}' for kind in KINDS)}."
            )
        mark_partial_sums(module, self.axis)
        bind(name, module, self, _run)


def _run(bound: Bound, original: Any, module: Any, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
    del module
    if bound.axis not in varying_axes(x):
        x = convert(x, Replicate(), Shard(bound.style.sequence_dim), bound.axis, bound.where)
    return original(x, *args, **kwargs)
