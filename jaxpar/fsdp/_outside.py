"""A parameter that is read where nobody has gathered it: an error at the line that reads it.

    in the loss function   model.embed(tokens)   ->  nnx.Embed reads its table
    table is a part        ParallelizeError: ... fully_shard(model.embed, mesh['dp'])
    table is whole         its value: the unit has gathered it, or there is one device

For the time of a trace, variables that hold parts get a class that looks at the shape of what is read; the program is the same.
Parts that are taken out of the module (`jax.tree.leaves(nnx.state(model))`) are plain arrays, and are not looked at.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._record import record_of
from jaxpar.fsdp._order import modules_at_hand
from jaxpar.fsdp._unit import is_shard, named_own_variables, unit_of

Variable = nnx.Variable[Any]


@contextlib.contextmanager
def refused_outside(model: nnx.Module) -> Iterator[None]:
    """Within the block, a parameter of the model can be read where its unit has gathered it, and nowhere else.

    Raises:
        ParallelizeError: it is read elsewhere.
    """
    found = {id(x): x for _, x in nnx.iter_graph(model) if isinstance(x, nnx.Param) and _is_part(x)}.values()
    classes = [type(variable) for variable in found]
    try:
        for variable in found:
            variable.__class__ = _watched(type(variable))
        yield
    finally:
        for variable, cls in zip(found, classes, strict=True):
            variable.__class__ = cls


@functools.cache
def _watched(cls: Any) -> Any:
    """The class of a variable, with a check in front of what reads its value."""

    def get_value(self: Any, **index: Any) -> Any:
        if is_shard(self, self.get_raw_value()):
            raise _error(self)
        return cls.get_value(self, **index)

    namespace = {
        "get_value": get_value,
        "__slots__": (),
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (cls,), namespace)


def _is_part(variable: Variable) -> bool:
    record = record_of(variable)
    return record is not None and record.is_shard(variable.get_raw_value())


def _error(variable: Variable) -> ParallelizeError:
    record, x = record_of(variable), variable.get_raw_value()
    assert record is not None
    axis = repr(record.axes[0]) if len(record.axes) == 1 else repr(record.axes)
    name, unit = _names(variable)
    *module, _ = name.split(".")
    called = "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in module)
    own = f"is called elsewhere, make it a unit of its own: fully_shard(model{called}, mesh[{axis}])."
    return ParallelizeError(
        f"TrainStep: {name} is used outside a call of its unit, {unit}. There a device has no more than its part along dim "
        f"{(record.dim or 0) % x.ndim} over {record.axes}, {x.dtype}{list(x.shape)}, which would be taken for the whole parameter. "
        f"A unit of fully_shard gathers in its __call__ and its public methods: use the parameter inside them (a private one: "
        f"register_fsdp_forward_method(unit, name)). " + (f"If model{called} {own}" if module else "")
    )


def _names(variable: Variable) -> tuple[str, str]:
    """The dotted name of a variable of the model in this trace, and of its unit."""
    for model in modules_at_hand():
        for path, module in nnx.iter_modules(model):
            unit = unit_of(module)
            for name, own in named_own_variables(module) if unit else ():
                if own is variable:
                    prefix = ".".join(map(str, path))
                    return (f"{prefix}.{name}" if prefix else name), prefix or "the model itself"
    return "a parameter", "in which the code has a copy of it, as within nnx.remat"
