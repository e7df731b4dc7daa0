"""`PipelineStages`: stages by hand, one module each.

x -> stages[0] -> stages[1] -> stages[2] -> y          keyword arguments (a mask) reach every stage
"""

from collections.abc import Sequence
from typing import Any

from flax import nnx

from jaxpar._errors import ParallelizeError


class PipelineStages(nnx.Module):
    """Modules called one after the other, each of them a stage of `pipeline`.

    Called, it is the whole model: on one device, or in the loss of a `TrainStep`. A stage that returns a tuple gives the
    next one as many arguments. Modules may share variables (tied weights: `last.table = first.table`). Source: PyTorch's
    `PipelineStage` (parity PP3), of which there is one on each rank; here one process may hold them all.

    Args:
        stages: modules that are called `y = stage(x, **kwargs)`, in order.

    Raises:
        ParallelizeError: no stage, one that is no callable module, or a module twice.

    Example:
        >>> import jaxpar
        >>> from flax import nnx
        >>> mesh = jaxpar.init_device_mesh((2, 4), ("pp", "dp"))
        >>> first, last = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1))
        >>> model = jaxpar.pp.PipelineStages([first, last])
        >>> _ = jaxpar.pp.pipeline(model, mesh["pp"], n_microbatches=4)
        >>> jaxpar.pp.plan_of(model).splits
        (('stages.1', 'beginning'),)
    """

    def __init__(self, stages: Sequence[nnx.Module]) -> None:
        _check(stages)
        self.stages = nnx.List(stages)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the last stage makes of what the first is given; all are given the keyword arguments."""
        out: Any = None
        for stage in self.stages:
            out = stage(*args, **kwargs)  # type: ignore[operator]
            args = out if isinstance(out, tuple) else (out,)
        return out


def _check(stages: Sequence[nnx.Module]) -> None:
    if not stages:
        raise ParallelizeError("PipelineStages: there is no stage. Write PipelineStages([first, second]).")
    for i, stage in enumerate(stages):
        if not (isinstance(stage, nnx.Module) and callable(stage)):
            raise ParallelizeError(
                f"PipelineStages: stages[{i}] is a {type(stage).__name__}, and a stage is an nnx.Module that is called as "
                f"y = stage(x). Write it as a module, with its parameters in it."
            )
        first = next(k for k, other in enumerate(stages) if other is stage)
        if first != i:
            raise ParallelizeError(
                f"PipelineStages: stages[{first}] and stages[{i}] are one {type(stage).__name__}, and a module is one stage. For "
                f"tied weights give two modules one variable: stages[{i}].kernel = stages[{first}].kernel."
            )
