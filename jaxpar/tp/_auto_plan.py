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

# How the last layer of a block is called, where shapes alone do not tell (all of them square).
LAST_NAMES = (
    "out",
    "o",
    "down",
    "proj",
    "out_proj",
    "o_proj",
    "c_proj",
    "down_proj",
    "wo",
    "w2",
    "fc2",
    "linear2",
    "output",
)


class ProposedPlan(dict[str, ParallelStyle]):
    """A plan as `parallelize_module` takes it; printed, one line for each name, and then what was left out.

    Attributes:
        unclear: names of modules that hold layers of which no last one could be told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unclear: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [f"{name:<{width}}  {type(style).__name__}()" for name, style in self.items()]
        return "\n".join(
            [*lines, *(f"# {name}: which layer is the last? not split" for name in self.unclear)]
        )


def auto_plan(module: nnx.Module) -> ProposedPlan:
    """Proposes how to split a model: column-split layers followed by a row-split one, in each module that holds them.

    A module's own `nnx.Linear`s are split if one of them, the last, leads back to the width that all others read: it by
    rows, the others by columns. Where several could be the last, the width of the model's norms and embeddings decides, then
    the layer's name (`out`, `down`, `proj`, ...). `nnx.MultiHeadAttention` is split by heads, `nnx.Embed` by rows. All else
    stays as it is. Print the proposal and read it: a fused qkv layer must keep its heads whole, which only you can say
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
    plan, widths, unclear = ProposedPlan(), _widths(module), []
    inside: list[tuple[Any, ...]] = []
    for path, found in sorted(nnx.iter_modules(module), key=lambda item: len(item[0])):
        if any(path[: len(outer)] == outer for outer in inside):
            continue
        if isinstance(found, nnx.MultiHeadAttention):
            inside.append(path)
            plan[_glob(path)] = AttentionParallel()
        elif isinstance(found, nnx.Embed):
            plan[_glob(path)] = RowwiseParallel()
        elif (layers := _linear_children(found)) and len(layers) > 1:
            last = _last(layers, widths)
            if last is None:
                unclear.append(_glob(path) or type(found).__name__)
                continue
            plan.update({_glob((*path, name)): ColwiseParallel() for name in layers if name != last})
            plan[_glob((*path, last))] = RowwiseParallel()
    if not plan:
        raise ParallelizeError(
            f"auto_plan: {type(module).__name__} has no nnx.Linear layers that lead out of a width and back, no "
            f"nnx.MultiHeadAttention and no nnx.Embed. Write the plan by hand: {{'name': ColwiseParallel(), ...}}."
        )
    plan.unclear = tuple(dict.fromkeys(unclear))
    return plan


def _last(layers: dict[str, nnx.Linear], widths: set[int]) -> str | None:
    """The one layer that leads back to the width that all others read."""

    def leads_back(name: str) -> bool:
        read = {layer.in_features for other, layer in layers.items() if other != name}
        return read == {layers[name].out_features}

    candidates = [name for name in layers if leads_back(name)]
    *_, final = layers
    if final in candidates and all(name.startswith("layers.") for name in layers):
        return final
    for prefers in (lambda name: layers[name].out_features in widths, lambda name: name in LAST_NAMES):
        if len(candidates) > 1:
            candidates = [name for name in candidates if prefers(name)] or candidates
    return candidates[0] if len(candidates) == 1 else None


def _widths(module: nnx.Module) -> set[int]:
    """Of the stream between blocks, as norms and embeddings have it."""
    found = [node for _, node in nnx.iter_modules(module)]
    norms = {x.num_features for x in found if isinstance(x, nnx.LayerNorm | nnx.RMSNorm)}
    return norms | {x.features for x in found if isinstance(x, nnx.Embed)}


def _linear_children(module: Any) -> dict[str, nnx.Linear]:
    """By name. Only those of an `nnx.Sequential` are in order: abstract modules have their attributes sorted by name."""
    if isinstance(module, nnx.Sequential):
        return {f"layers.{i}": x for i, x in enumerate(module.layers) if isinstance(x, nnx.Linear)}
    if isinstance(module, nnx.List | nnx.Dict):  # says nothing of how its members are used
        return {}
    return {name: x for name, x in vars(module).items() if isinstance(x, nnx.Linear)}


def _glob(path: tuple[Any, ...]) -> str:
    """`blocks.0.mlp.up` as `blocks.*.mlp.up`; an index at the end stays (`layers.0`)."""
    names = [str(part) for part in path]
    return ".".join("*" if name.isdigit() and i < len(names) - 1 else name for i, name in enumerate(names))
