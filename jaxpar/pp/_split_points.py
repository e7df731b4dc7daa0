"""Where a model is cut: at the beginning or the end of modules, by dotted name.

split_spec={"blocks.2": "beginning", "blocks.3": "end"}     stage 1 begins with blocks.2, stage 2 behind blocks.3
"""

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from flax import nnx

from jaxpar import _compat
from jaxpar._errors import ParallelizeError
from jaxpar._module import OUTSIDE, swap_class

SplitPoint = Literal["beginning", "end"]
Splits = tuple[tuple[str, SplitPoint], ...]


def check_splits(model: nnx.Module, split_spec: Mapping[str, SplitPoint]) -> Splits:
    """The split points in the order given, which is the order of the stages.

    Raises:
        ParallelizeError: a name that is no module of the model, one that is not called, or a word that is neither "beginning" nor "end".
    """
    modules = {_name(path): module for path, module in nnx.iter_modules(model) if path}
    names = [name for name, module in modules.items() if callable(module)]
    for name, point in split_spec.items():
        if name in modules and name not in names:
            raise ParallelizeError(
                f"pipeline: split_spec names {name!r}, a {type(modules[name]).__name__}, which is not called. Name a module "
                f"in it: {[other for other in names if other.startswith(f'{name}.')][:4]}."
            )
        if name not in names:
            close = difflib.get_close_matches(name, names, n=3)
            raise ParallelizeError(
                f"pipeline: split_spec names {name!r}, but {type(model).__name__} has no module of that name. "
                f"{f'Near it are {close}' if close else f'It has {names[:8]}'}."
            )
        if point not in ("beginning", "end"):
            raise ParallelizeError(
                f'pipeline: split_spec[{name!r}] is {point!r}; write "beginning" or "end" of the module.'
            )
    return tuple(split_spec.items())


def mark_splits(model: nnx.Module, splits: Splits, at_entry: Callable[[], None]) -> None:
    """Mark the stage entries in a model that lives only in a trace, in place: what enters a stage is marked by its number.

    Args:
        model: the model, built for the trace.
        splits: where stages begin.
        at_entry: called while tracing, whenever a stage begins.
    """
    modules = {_name(path): module for path, module in nnx.iter_modules(model)}
    for index, (name, point) in enumerate(splits, start=1):
        swap_class(modules[name], f"Split{index}", _marking(index, point, at_entry), level=OUTSIDE)


@functools.cache
def _marking(index: int, point: SplitPoint, at_entry: Callable[[], None]) -> Callable[..., Any]:
    """The call of a module at whose beginning or end stage `index` begins; cached, so that classes are shared."""

    def call(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if point == "end":
            out = original(*args, **kwargs)
            at_entry()
            return _marked(out, index)
        at_entry()
        args, kwargs = _marked((args, kwargs), index)
        return original(*args, **kwargs)

    return call


def _marked(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda x: _compat.mark_stage(x, index) if isinstance(x, jax.Array) else x, tree)


def _name(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))
