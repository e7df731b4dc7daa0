"""Does the optimizer's state lie as the parameters do?

built after fully_shard     mu: P("dp")    as its parameter
built before                mu: whole on every device: n times the memory, and the wrong shape for padded parameters
"""

from typing import Any

from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._named import dotted, splitting_axes
from jaxpar._record import Record, record_of

Path = tuple[Any, ...]
Variable = nnx.Variable[Any]


def check_optimizer_follows(model: nnx.Module, optimizer: nnx.Optimizer) -> None:
    """Checks that state which belongs to a sharded parameter is sharded over the same axes (rows O1, O6, W11).

    State of another shape than its parameter (Adafactor's factors) may lie as the optimizer put it.

    Args:
        model: a model, concrete or abstract.
        optimizer: the optimizer that trains it.

    Raises:
        ParallelizeError: the optimizer was built before `fully_shard`, or its state was put elsewhere since.
    """
    sharded = {
        path: variable
        for path, variable in _variables(model)
        if (record := record_of(variable)) is not None and record.dim is not None
    }
    for path, state in _variables(optimizer):
        owner = next((path[i:] for i in range(1, len(path)) if path[i:] in sharded), None)
        if owner is None:
            continue
        parameter, name, of = sharded[owner], dotted(path), dotted(owner)
        record = record_of(parameter)
        assert record is not None
        if record_of(state) is None:
            raise ParallelizeError(_built_before(name, of, state, parameter, record))
        if _shape(state) == _shape(parameter) and not _lies_on(state, record):
            raise ParallelizeError(
                f"the optimizer's {name} belongs to the parameter {of}, which is sharded over {record.axes}, but it lies as "
                f"{getattr(state.get_value(), 'sharding', None)}: it would take as much memory on every device as on one. Build the "
                f"optimizer from the sharded model, outside jit: optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)."
            )


def _built_before(name: str, of: str, state: Variable, parameter: Variable, record: Record) -> str:
    what = f"{list(_shape(state))}, while its parameter {of} is {list(_shape(parameter))}"
    stored = " (flat and padded)" if record.shape is not None else ""
    return (
        f"the optimizer was built before fully_shard: {name} has the shape {what}{stored}, sharded over {record.axes}. Its "
        f"state would stay whole on every device. Shard first, then build it: fully_shard(model, mesh), and after that "
        f"optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)."
    )


def _lies_on(variable: Variable, record: Record) -> bool:
    return set(record.axes) <= set(splitting_axes(getattr(variable.get_value(), "sharding", None)))


def _variables(module: nnx.Pytree) -> list[tuple[Path, Variable]]:
    """The variables that hold an array (a masked optimizer's may hold none)."""
    return [
        (path, node)
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Variable) and hasattr(node.get_value(), "shape")
    ]


def _shape(variable: Variable) -> tuple[int, ...]:
    return tuple(variable.get_value().shape)
