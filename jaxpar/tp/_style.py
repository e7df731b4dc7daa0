"""What all styles have in common: an axis, the class swap, and where they act.

plan[name] = ColwiseParallel()    at construction: the module's parameters are split, its class swapped
module(x) in a training step      the style's `run`, if its axis is manual and has more than one rank
module(x) in global view          the plain module: XLA's partitioner does the work
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jaxpar._compat import forget_axes
from jaxpar._errors import ParallelizeError
from jaxpar._module import INSIDE, manual_axes, swap_class
from jaxpar._record import mark_partial
from jaxpar.mesh import MeshLike
from jaxpar.tp._place import split_variable

STYLE = "_jaxpar_tp_style"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelStyle(abc.ABC):
    """How one module of a model is split over one mesh axis; see the styles.

    Args:
        axis: the mesh axis; default the only one that `parallelize_module` was given.
    """

    axis: str | None = None

    @abc.abstractmethod
    def apply(self, name: str, module: nnx.Module, mesh: MeshLike) -> None:
        """Splits the parameters of a module and swaps its class, in place.

        Raises:
            ParallelizeError: the style does not handle such a module, or a dim does not divide.
        """


@dataclasses.dataclass(frozen=True)
class Bound:
    """A style on a module: the attribute of its class.

    Args:
        name: the module's dotted name, for messages.
        style: the style, its axis known.
        run: what a call does; `run(original, module, *args, **kwargs)`.
    """

    name: str
    style: Any
    run: Callable[..., Any] = dataclasses.field(compare=False, hash=False)

    @property
    def axis(self) -> str:
        """The mesh axis."""
        return self.style.axis

    @property
    def where(self) -> str:
        """For messages: style and module."""
        return f"{type(self.style).__name__} on {self.name}"


def bind(
    name: str,
    module: Any,
    style: ParallelStyle,
    run: Callable[..., Any],
    *,
    methods: tuple[str, ...] = ("__call__",),
) -> None:
    """Swaps the class of a module: in a step its methods become `run(bound, original, module, ...)`.

    Raises:
        ParallelizeError: the module has a style already.
    """
    if style_of(module) is not None:
        raise ParallelizeError(
            f"parallelize_module: {name} has a style already, {type(style_of(module)).__name__}. Give each module one style; what is to happen "
            f"to inputs and outputs of a module around it can be said there, with PrepareModuleInputOutput."
        )
    assert style.axis is not None
    bound = Bound(name, style, run)
    swap_class(module, "TP", _call, {STYLE: bound}, methods=methods, level=INSIDE)


def style_of(module: Any) -> ParallelStyle | None:
    """The style that a module has, or None."""
    bound: Bound | None = getattr(type(module), STYLE, None)
    return None if bound is None else bound.style


def is_live(axis: str) -> bool:
    """Whether code runs per device along the axis, and not alone."""
    return axis in manual_axes() and jax.lax.axis_size(axis) > 1


def _call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    bound: Bound = getattr(type(self), STYLE)
    if not is_live(bound.axis):
        out = original(*args, **kwargs)
        # One rank: what it computes is the whole, also by JAX's type, if the parameters came in as split.
        return forget_axes_of(out, bound.axis) if bound.axis in manual_axes() else out
    return bound.run(bound, original, self, *args, **kwargs)


def forget_axes_of(tree: Any, axis: str) -> Any:
    """Types the arrays as equal over an axis of size 1."""
    return jax.tree.map(lambda x: forget_axes(x, (axis,)) if isinstance(x, jax.Array) else x, tree)


def split_parameters(name: str, module: Any, cuts: Any, axis: str, mesh: MeshLike) -> None:
    """Splits the parameters that `cuts` names (`Cut`s)."""
    for cut in cuts:
        split_variable(f"{name}.{cut.name}", getattr(module, cut.name), cut.dim, axis, mesh)


def mark_partial_sums(module: Any, axis: str, names: tuple[str, ...] | None = None) -> None:
    """Notes that each rank's gradient of these parameters (default: all) is a term of the sum over `axis`."""
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Param) and (
            names is None or any(variable is getattr(module, name) for name in names)
        ):
            mark_partial(variable, axis)


@contextlib.contextmanager
def without_bias(module: Any) -> Iterator[Any]:
    """Within the block a layer has no bias; yields the variable, or None."""
    attributes = vars(module)
    before = {name: attributes[name] for name in ("bias", "use_bias") if name in attributes}
    bias = before.get("bias")
    try:
        if bias is not None:
            attributes.update({name: None if name == "bias" else False for name in before})
        yield bias
    finally:
        attributes.update(before)


def check_input(bound: Bound, x: jax.Array, reads: dict[int, int]) -> None:
    """Refuses an input whose dims (from the end) have other lengths than the layer reads here.

    Raises:
        ParallelizeError: a layer before has left its output sharded, or has not.
    """
    for dim, size in reads.items():
        if x.ndim < -dim or x.shape[dim] != size:
            raise ParallelizeError(
                f"{bound.where}: on each rank of {bound.axis!r} it reads {size} elements in dim {dim}, and was given "
                f"{x.dtype}{list(x.shape)}. Layouts of neighbours must meet: a ColwiseParallel leaves Shard(-1) unless it has "
                f"output_layouts=Replicate(), and a RowwiseParallel reads Shard(-1) unless it has input_layouts=Replicate()."
            )
