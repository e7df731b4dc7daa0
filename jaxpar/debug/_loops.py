"""How often the body of a `while` runs.

    while(tuple(0, ...)), condition={ i < 12 }, body={ i + 1, ... }   ->   12

XLA writes `known_trip_count` when it has proved it. Otherwise the three facts that make a counted loop are read
here: a start, a step and a bound that are constants. A loop that is not counted has no trip count (None).
"""

import re
from dataclasses import dataclass

from jaxpar.debug._hlo import Computation, Instruction, Module

_KNOWN = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')
_PASSED_THROUGH = ("copy", "bitcast", "convert", "reshape")


@dataclass(frozen=True)
class _Linear:
    """The value `loop_variable[index] + offset`, or the constant `offset` when index is None."""

    index: int | None
    offset: int


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Number of runs of `loop`'s body per run of `computation`; None when it cannot be told."""
    if known := _KNOWN.search(loop.attributes):
        return int(known.group(1))
    condition = module.computations.get(loop.attribute("condition") or "")
    body = module.computations.get(loop.attribute("body") or "")
    bound = _bound(module, condition) if condition else None
    if bound is None or body is None:
        return None
    index, limit, inclusive = bound
    start = _element(module, computation, loop.operands[0], index)
    step = _element(module, body, body.root.name, index)
    if start is None or start.index is not None or step is None or step.index != index or step.offset <= 0:
        return None
    return max(0, -(-(limit + inclusive - start.offset) // step.offset))


def _bound(module: Module, condition: Computation) -> tuple[int, int, bool] | None:
    """(loop variable, limit, limit itself included) of `i < limit`, seen through one fusion."""
    compare, env, where = condition.root, {}, condition
    if compare.opcode == "fusion":
        where = module.computations[compare.called[0]]
        env = _arguments(module, condition, compare, {})
        compare = where.root
    if compare.opcode != "compare" or compare.attribute("direction") not in ("LT", "LE"):
        return None
    left, right = (_value(module, where, name, env) for name in compare.operands)
    if left is None or right is None or left.index is None or left.offset or right.index is not None:
        return None
    return left.index, right.offset, compare.attribute("direction") == "LE"


def _element(module: Module, computation: Computation, name: str, index: int) -> _Linear | None:
    """Element `index` of the tuple `name`."""
    instruction = computation.by_name.get(name)
    if instruction is None or instruction.opcode != "tuple" or index >= len(instruction.operands):
        return None
    return _value(module, computation, instruction.operands[index], {})


def _value(module: Module, computation: Computation, name: str, env: dict[str, _Linear]) -> _Linear | None:
    instruction = computation.by_name.get(name)
    if instruction is None:
        return None
    if instruction.opcode == "parameter":
        return env.get(instruction.arguments)
    if instruction.opcode == "constant":
        return _Linear(None, int(c)) if re.fullmatch(r"-?\d+", c := instruction.arguments.strip()) else None
    if instruction.opcode == "get-tuple-element":
        source = computation.by_name.get(instruction.operands[0])
        is_loop_variable = source is not None and source.opcode == "parameter" and not env
        return _Linear(int(instruction.attribute("index") or 0), 0) if is_loop_variable else None
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called[0]]
        return _value(module, inner, inner.root.name, _arguments(module, computation, instruction, env))
    values = [_value(module, computation, operand, env) for operand in instruction.operands]
    if instruction.opcode in _PASSED_THROUGH:
        return values[0]
    left, right = values if len(values) == 2 else (None, None)
    if instruction.opcode == "add" and left is not None and right is not None:
        if left.index is None or right.index is None:
            index = right.index if left.index is None else left.index
            return _Linear(index, left.offset + right.offset)
    return None


def _arguments(
    module: Module, computation: Computation, fusion: Instruction, env: dict[str, _Linear]
) -> dict[str, _Linear]:
    """What the fusion's parameters are bound to, by parameter number."""
    values = ((str(k), _value(module, computation, name, env)) for k, name in enumerate(fusion.operands))
    return {number: value for number, value in values if value is not None}
