"""What can be said of a plan before anything runs: terms of a sum must be summed by somebody.

blocks.*.attention.out    RowwiseParallel(output_layouts=Partial())
blocks.*.attention        PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Shard(1))    ok
"""

from collections.abc import Sequence

from jaxpar._errors import ParallelizeError
from jaxpar.mesh import Partial
from jaxpar.tp._prepare import PrepareModuleInputOutput
from jaxpar.tp._style import ParallelStyle


def check_partial_outputs(styled: Sequence[tuple[str, ParallelStyle]]) -> None:
    """Refuses plans in which a layer leaves terms of a sum and no module around it sums them.

    Raises:
        ParallelizeError: such a layer.
    """
    summing = [name for name, style in styled if _sums(style)]
    for name, style in styled:
        left = getattr(style, "output_layouts", None)
        if not isinstance(left, Partial) or any(_is_inside(name, around) for around in summing):
            continue
        around = name.rpartition(".")[0] or "the module around it"
        raise ParallelizeError(
            f"parallelize_module: {name} has {type(style).__name__}(output_layouts=Partial()): each rank is left with a term of the "
            f"sum, and nothing around it sums. Add {{{around!r}: PrepareModuleOutput(output_layouts=Partial(), "
            f"desired_output_layouts=Replicate())}}, or drop output_layouts."
        )


def _sums(style: ParallelStyle) -> bool:
    if not isinstance(style, PrepareModuleInputOutput):
        return False
    pairs = style.pairs("output")
    return any(isinstance(before, Partial) and not isinstance(after, Partial) for before, after in pairs)


def _is_inside(name: str, around: str) -> bool:
    return name.startswith(f"{around}.")
