"""`auto_plan`: a plan proposed from the module tree: columns first, rows last, inside each block.

mlp: gate D->F, up D->F, down F->D     the last one leads back to D: rows; those before it, from D: columns
"""

from typing import Any

from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar.tp._attention import AttentionParallel
from jaxpar.tp._colwise import ColwiseParallel
from jaxpar.tp._rowwise import RowwiseParallel
from jaxpar.tp._style import ParallelStyle


class ProposedPlan(dict[str, ParallelStyle]):
    """A plan as `parallelize_module` takes it; printed, one line for each name."""

    def __str__(self) -> str:
        width = max(map(len, self))
        return "\n".join(f"{name:<{width}}  {_short(style)}" for name, style in self.items())


def auto_plan(module: nnx.Module) -> ProposedPlan:
    """Proposes how to split a model: column-split layers followed by a row-split one, in each module that holds them.

    A module's own `nnx.Linear`s are split if the last one leads back to the width that the first one reads: it by rows, the
    others of that width by columns. `nnx.MultiHeadAttention` is split by heads, `nnx.Embed` by rows. All else stays as it
    is. Print the proposal and read it: a fused qkv layer must keep its heads whole, which only you can say
    (`ColwiseParallel(heads=...)`).

    Args:
        module: the model, concrete or abstract.

    Returns:
        The plan, a dict to change and to give to `parallelize_module`; layers of a list have one entry (`blocks.*`).

    Raises:
        ParallelizeError: nothing in the model can be split.

    Example:
        >>> from flax import nnx
        >>> from jaxpar.tp import auto_plan
        >>> class MLP(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        >>> print(auto_plan(nnx.List([MLP(nnx.Rngs(i)) for i in range(2)])))
        *.up    ColwiseParallel()
        *.down  RowwiseParallel()
    """
    plan = ProposedPlan()
    inside: list[tuple[Any, ...]] = []
    for path, found in sorted(nnx.iter_modules(module), key=lambda item: len(item[0])):
        if any(path[: len(outer)] == outer for outer in inside):
            continue
        if isinstance(found, nnx.MultiHeadAttention):
            inside.append(path)
            plan[_glob(path)] = AttentionParallel()
        elif isinstance(found, nnx.Embed):
            plan[_glob(path)] = RowwiseParallel()
        else:
            plan.update({_glob((*path, name)): style for name, style in _columns_then_row(found).items()})
    if not plan:
        raise ParallelizeError(
            f"auto_plan: {type(module).__name__} has no nnx.Linear layers that lead out of a width and back, no "
            f"nnx.MultiHeadAttention and no nnx.Embed. Write the plan by hand: {{'name': ColwiseParallel(), ...}}."
        )
    return plan


def _columns_then_row(module: Any) -> dict[str, ParallelStyle]:
    layers = _linear_children(module)
    if len(layers) < 2:
        return {}
    (*firsts, (last_name, last)), width = layers, layers[0][1].in_features
    columns = [name for name, layer in firsts if layer.in_features == width]
    if last.out_features != width or len(columns) != len(firsts):
        return {}
    return {**{name: ColwiseParallel() for name in columns}, last_name: RowwiseParallel()}


def _linear_children(module: Any) -> list[tuple[str, nnx.Linear]]:
    """In the order in which they were set: for a list, by index."""
    if isinstance(module, nnx.Sequential):
        return [(f"layers.{i}", x) for i, x in enumerate(module.layers) if isinstance(x, nnx.Linear)]
    return [(name, x) for name, x in vars(module).items() if isinstance(x, nnx.Linear)]


def _glob(path: tuple[Any, ...]) -> str:
    """`blocks.0.mlp.up` as `blocks.*.mlp.up`; an index at the end stays (`layers.0`)."""
    names = [str(part) for part in path]
    return ".".join("*" if name.isdigit() and i < len(names) - 1 else name for i, name in enumerate(names))


def _short(style: ParallelStyle) -> str:
    return f"{type(style).__name__}()"
