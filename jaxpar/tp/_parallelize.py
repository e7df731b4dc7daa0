"""`parallelize_module`: a plan of styles by name, put on a model.

plan {"blocks.*.mlp.up": ColwiseParallel(), "blocks.*.mlp.down": RowwiseParallel()}
     -> the kernels of all `up`s split by columns, those of all `down`s by rows; their classes swapped
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._module import INSIDE, ModuleT, swap_class
from jaxpar._pytree import matches
from jaxpar.mesh import MeshLike, axes_of
from jaxpar.tp._check_plan import check_partial_outputs
from jaxpar.tp._shared import sharing
from jaxpar.tp._style import ParallelStyle

Plan = ParallelStyle | Mapping[str, ParallelStyle]
SHARES = "_jaxpar_tp_shares"


def parallelize_module(module: ModuleT, mesh: MeshLike, plan: Plan) -> ModuleT:
    """Splits the maths of a model's layers over a mesh axis, as the plan says.

    In a training step every styled layer computes its part and communicates as its style says; everywhere else (`model(x)`
    in a notebook, evaluation under `nnx.jit`) the model is the plain model on sharded arrays. A transformer block in the
    usual plan (column-split, then row-split, in attention and MLP) has 2 all-reduces forward and 2 backward.

    Data parallelism goes around it in any order of calls: `fully_shard` adds its axis to these shardings.

    Args:
        module: a Flax NNX module, concrete or abstract (`nnx.eval_shape`). Changed in place.
        mesh: the axes to split over, such as `mesh["tp"]`; of several, each style names its own (`axis=`).
        plan: styles by globs of dotted module names (`*` one segment, `**` any number); or one style, for `module` itself.

    Returns:
        `module`, the same object.

    Raises:
        ParallelizeError: a glob that matches nothing, a module that its style does not handle or that has a style
            already, a dim that does not divide, an axis that is not in the mesh.

    Source: `torch.distributed.tensor.parallel.parallelize_module`, row T1, where a glob that matches nothing is a warning.

    Example:
        >>> from flax import nnx
        >>> from jaxpar.mesh import init_device_mesh
        >>> from jaxpar.tp import ColwiseParallel, RowwiseParallel, parallelize_module
        >>> mlp = nnx.Sequential(nnx.Linear(8, 32, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(32, 8, rngs=nnx.Rngs(1)))
        >>> mesh = init_device_mesh((2, 4), ("dp", "tp"))
        >>> mlp = parallelize_module(mlp, mesh["tp"], {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()})
        >>> mlp.layers[0].kernel.sharding.shard_shape((8, 32)), mlp.layers[2].kernel.sharding.shard_shape((32, 8))
        ((8, 8), (8, 8))
    """
    styled = _styled(module, plan)
    check_partial_outputs([(name, style) for name, _, _, style in styled])
    for _, pattern, target, style in styled:
        _with_axis(pattern, style, mesh).apply(pattern, target, mesh)
    if callable(module) and not hasattr(type(module), SHARES):
        swap_class(module, "TP", _call_sharing, {SHARES: True}, level=INSIDE)
    return module


def _call_sharing(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    del self
    with sharing():
        return original(*args, **kwargs)


def _styled(module: nnx.Module, plan: Plan) -> list[tuple[str, str, nnx.Module, ParallelStyle]]:
    """(dotted name, glob, module, style) of what the plan names; the globs are in messages, one class for all they match."""
    if isinstance(plan, ParallelStyle):
        name = type(module).__name__
        return [(name, name, module, plan)]
    if not isinstance(plan, Mapping):
        raise ParallelizeError(
            f"parallelize_module: the plan is {type(plan).__name__}. Write a dict of styles by module name, as in "
            f"{{'blocks.*.mlp.up': ColwiseParallel(), 'blocks.*.mlp.down': RowwiseParallel()}}, or one style."
        )
    named = [(".".join(map(str, path)), found) for path, found in nnx.iter_modules(module) if path]
    styled = []
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ParallelizeError(
                f"parallelize_module: plan[{pattern!r}] is {style!r}, no style. Write {{{pattern!r}: ColwiseParallel()}}."
            )
        found = [(name, target) for name, target in named if matches(name, pattern)]
        if not found:
            nearest = difflib.get_close_matches(pattern, [name for name, _ in named], n=4, cutoff=0.0)
            raise ParallelizeError(
                f"parallelize_module: plan[{pattern!r}] matches no module, so nothing would be split. The nearest names are "
                f"{nearest}; '*' stands for one segment of a dotted name, '**' for any number."
            )
        styled += [(name, pattern, target, style) for name, target in found]
    return styled


def _with_axis(pattern: str, style: ParallelStyle, mesh: MeshLike) -> ParallelStyle:
    names = axes_of(mesh)
    if style.axis is None:
        if len(names) != 1:
            raise ParallelizeError(
                f"parallelize_module: the mesh has the axes {names}, and the style of {pattern!r} does not say which one it splits "
                f"over. Give the one, as in mesh[{names[-1]!r}], or write {type(style).__name__}(axis={names[-1]!r})."
            )
        return dataclasses.replace(style, axis=names[0])
    if style.axis not in names:
        raise ParallelizeError(
            f"parallelize_module: {type(style).__name__}(axis={style.axis!r}) of {pattern!r}: the mesh that was given has the axes "
            f"{names}."
        )
    return style
