"""`PrepareModuleInput`, `PrepareModuleOutput` and both: conversions where a module is entered and left.

x f32[B, T@tp, D] --all-gather--> attention --> terms of a sum --reduce-scatter--> f32[B, T@tp, D]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar.mesh import MeshLike, Placement, Replicate
from jaxpar.tp._convert import convert, to_whole
from jaxpar.tp._style import Bound, ParallelStyle, bind

Layouts = Placement | None | Sequence[Placement | None]
Pairs = tuple[tuple[Placement | None, Placement | None], ...]


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInputOutput(ParallelStyle):
    """Converts the arguments of a module before it runs and its outputs after.

    An input that is to be `Replicate()` becomes *whole*: what reads it is split (column-split layers inside), so the backward
    of the conversion is a reduce-scatter (from `Shard`) or an all-reduce (from `Replicate`). An output `Replicate()` is
    equal on all ranks, also by JAX's type.

    Args:
        axis: the mesh axis; default the only one that `parallelize_module` was given.
        input_layouts: of each positional argument, how it lies; None leaves it alone. One placement: the first argument.
        desired_input_layouts: how each is to lie.
        input_kwarg_layouts: of keyword arguments, by name, how they lie.
        desired_input_kwarg_layouts: how they are to lie.
        output_layouts: of each output, how it lies.
        desired_output_layouts: how each is to lie.

    Raises:
        ParallelizeError: (constructing it) lengths or names of a pair of options differ.

    Source: `torch.distributed.tensor.parallel.PrepareModuleInputOutput`, rows T5-T7. Its `use_local_*` options have no
    meaning here: activations always are per-device arrays.

    Example:
        >>> from jaxpar.mesh import Partial, Replicate, Shard
        >>> from jaxpar.tp import PrepareModuleInputOutput
        >>> style = PrepareModuleInputOutput(input_layouts=Shard(1), desired_input_layouts=Replicate(),
        ...                                  output_layouts=Partial(), desired_output_layouts=Shard(1))
        >>> style.input_layouts
        (Shard(dim=1),)
    """

    input_layouts: Layouts = ()
    desired_input_layouts: Layouts = ()
    input_kwarg_layouts: Mapping[str, Placement | None] = field(default_factory=dict)
    desired_input_kwarg_layouts: Mapping[str, Placement | None] = field(default_factory=dict)
    output_layouts: Layouts = ()
    desired_output_layouts: Layouts = ()

    def __post_init__(self) -> None:
        for name in ("input_layouts", "desired_input_layouts", "output_layouts", "desired_output_layouts"):
            object.__setattr__(self, name, _tuple(getattr(self, name)))
        for name in ("input_kwarg_layouts", "desired_input_kwarg_layouts"):
            object.__setattr__(self, name, Frozen(getattr(self, name)))
        for before, after in (
            ("input_layouts", "desired_input_layouts"),
            ("input_kwarg_layouts", "desired_input_kwarg_layouts"),
            ("output_layouts", "desired_output_layouts"),
        ):
            sources, targets = getattr(self, before), getattr(self, after)
            if len(sources) != len(targets) or (
                isinstance(sources, dict) and sources.keys() != targets.keys()
            ):
                raise ParallelizeError(
                    f"{type(self).__name__}: {before} and {after} say how the same values lie before and after, but they do not "
                    f"pair up: {len(sources)} {_plain(sources)} and {len(targets)} {_plain(targets)}. Write None for a value to "
                    f"leave alone."
                )

    def pairs(self, what: Literal["input", "output"]) -> Pairs:
        """How each positional argument, or each output, lies and is to lie."""
        before, after = getattr(self, f"{what}_layouts"), getattr(self, f"desired_{what}_layouts")
        return tuple(zip(before, after, strict=True))

    def apply(self, name: str, module: Any, mesh: MeshLike) -> None:
        del mesh
        if isinstance(module, nnx.List | nnx.Dict) or not callable(module):
            raise ParallelizeError(
                f"parallelize_module: {type(self).__name__} on {name}: {type(module).__name__} is never called itself."
            )
        bind(name, module, self, _run)


class PrepareModuleInput(PrepareModuleInputOutput):
    """Converts the arguments of a module before it runs; see `PrepareModuleInputOutput`.

    Source: `torch.distributed.tensor.parallel.PrepareModuleInput`, row T5.

    Example:
        >>> from jaxpar.mesh import Replicate, Shard
        >>> from jaxpar.tp import PrepareModuleInput
        >>> PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()).desired_input_layouts
        (Replicate(),)
    """


class PrepareModuleOutput(PrepareModuleInputOutput):
    """Converts the outputs of a module after it ran; see `PrepareModuleInputOutput`.

    Source: `torch.distributed.tensor.parallel.PrepareModuleOutput`, row T6.

    Example:
        >>> from jaxpar.mesh import Replicate, Shard
        >>> from jaxpar.tp import PrepareModuleOutput
        >>> PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate()).output_layouts
        (Shard(dim=-1),)
    """


class Frozen(dict[str, Any]):
    """A dict that can be an attribute of a class made once: hashable, not to be changed."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(sorted(self.items(), key=lambda item: item[0])))


def _run(bound: Bound, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    del module
    style: PrepareModuleInputOutput = bound.style
    pairs = style.pairs("input")
    _check_count(bound, "positional arguments", "input_layouts", len(args), len(pairs), exact=False)
    converted = [_input(bound, x, source, target) for x, (source, target) in zip(args, pairs, strict=False)]
    for name, source in style.input_kwarg_layouts.items():
        if name in kwargs:
            kwargs[name] = _input(bound, kwargs[name], source, style.desired_input_kwarg_layouts[name])
    out = original(*converted, *args[len(converted) :], **kwargs)
    return _outputs(bound, out) if style.output_layouts else out


def _outputs(bound: Bound, out: Any) -> Any:
    several, pairs = isinstance(out, tuple | list), bound.style.pairs("output")
    values = list(out) if several else [out]
    _check_count(bound, "outputs", "output_layouts", len(values), len(pairs), exact=True)
    values = [
        x if source is None or target is None else convert(x, source, target, bound.axis, bound.where)
        for x, (source, target) in zip(values, pairs, strict=True)
    ]
    return type(out)(values) if several else values[0]


def _input(bound: Bound, x: jax.Array, source: Placement | None, target: Placement | None) -> jax.Array:
    if source is None or target is None:
        return x
    if isinstance(target, Replicate):
        return to_whole(x, source, bound.axis, bound.where)
    return convert(x, source, target, bound.axis, bound.where)


def _check_count(bound: Bound, what: str, option: str, found: int, said: int, *, exact: bool) -> None:
    if found < said or (exact and found != said):
        raise ParallelizeError(
            f"{bound.where}: {option} names {said} {what}, and the call has {found}. Give one placement, or None, for each."
        )


def _tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    return tuple(layouts) if isinstance(layouts, Sequence) else (layouts,)


def _plain(layouts: Any) -> Any:
    return dict(layouts) if isinstance(layouts, dict) else layouts
