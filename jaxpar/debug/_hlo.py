"""Read the text of an optimized HLO module into computations and instructions.

Text of a module:                               What is kept:
    HloModule jit_f, is_scheduled=true, ...     Module(is_scheduled, num_devices, entry, computations)
    %region_0 (a: f32[]) -> f32[] { ... }         computation name -> instructions in printed order
    ENTRY %main (p: f32[8]) -> f32[8] {
      %p = f32[8]{0} parameter(0)                 Instruction(name, shape, opcode, operands, attributes)
      ROOT %r = f32[8]{0} all-reduce(%p), ...
    }

In a scheduled module the printed order of a computation is the order of issue. Operands are printed without
their types, so a type is looked up by name; long operand lists contain `/*index=5*/` comments.
"""

import functools
import math
import re
from dataclasses import dataclass

# Bits per element of HLO's element types and the name that numpy and JAX users know.
_ELEMENT_TYPES = {
    "pred": (8, "bool"),
    "s2": (2, "int2"),
    "u2": (2, "uint2"),
    "s4": (4, "int4"),
    "u4": (4, "uint4"),
    "s8": (8, "int8"),
    "u8": (8, "uint8"),
    "s16": (16, "int16"),
    "u16": (16, "uint16"),
    "s32": (32, "int32"),
    "u32": (32, "uint32"),
    "s64": (64, "int64"),
    "u64": (64, "uint64"),
    "f16": (16, "float16"),
    "bf16": (16, "bfloat16"),
    "f32": (32, "float32"),
    "f64": (64, "float64"),
    "c64": (64, "complex64"),
    "c128": (128, "complex128"),
}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=]+) = ")
_METADATA = re.compile(r'metadata=\{(?:"(?:\\.|[^"\\])*"|[^"}])*\}')
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|async_computation)=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")


@dataclass(frozen=True)
class ArrayType:
    """One array in an HLO shape: element type as numpy names it, and dims."""

    dtype: str
    dims: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    arguments: (
        str  # the raw text between the parentheses: the literal of a constant, the number of a parameter
    )
    attributes: str  # what follows the operands, without `metadata={...}`
    op_name: str  # the JAX name stack, from the metadata
    is_root: bool

    def attribute(self, key: str) -> str | None:
        """The plain value of `key=value` or `key=%value`, or None."""
        found = re.search(rf'\b{key}="?%?([^\s,{{}}()"]+)', self.attributes)
        return found.group(1) if found else None

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this instruction runs, in printed order."""
        names = _CALLED.findall(self.attributes)
        for inner in _CALLED_LIST.findall(self.attributes):
            names += [name.strip().lstrip("%") for name in inner.split(",")]
        return tuple(names)


@dataclass(frozen=True)
class Computation:
    """A named list of instructions."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    def operand_types(self, instruction: Instruction) -> tuple[ArrayType, ...]:
        """Array types of all operands, tuples flattened."""
        known = (self.by_name[name] for name in instruction.operands if name in self.by_name)
        return tuple(leaf for operand in known for leaf in array_types(operand.shape))


@dataclass(frozen=True)
class Module:
    """A parsed program."""

    computations: dict[str, Computation]
    entry: str
    is_scheduled: bool
    num_devices: int


def parse_module(text: str) -> Module:
    """Parse HLO text; `ValueError` when it holds no entry computation."""
    header = text[: text.find("\n")] if "\n" in text else text
    computations: dict[str, Computation] = {}
    entry, name, body = "", "", []
    for line in text.splitlines():
        if not name:
            found = None if line.startswith("HloModule") else _COMPUTATION.match(line)
            if found:
                name, body = found.group(2), []
                entry = name if found.group(1) else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(body))
            name = ""
        elif instruction := _parse_instruction(line):
            body.append(instruction)
    if entry not in computations:
        raise ValueError("the text holds no ENTRY computation")
    return Module(computations, entry, "is_scheduled=true" in header, _num_devices(header))


def array_types(shape: str) -> tuple[ArrayType, ...]:
    """`(f32[8,4]{1,0}, s32[])` -> its arrays; tokens and opaque values take no bytes and are left out.

    >>> array_types("(bf16[8,4]{1,0}, s32[])")[0]
    ArrayType(dtype='bfloat16', dims=(8, 4), num_bytes=64)
    """
    found = []
    for element, dims_text in _ARRAY.findall(shape):
        bits, dtype = _element(element)
        dims = tuple(int(dim.lstrip("<=")) for dim in dims_text.split(",") if dim)
        if bits:
            found.append(ArrayType(dtype, dims, (math.prod(dims) * bits + 7) // 8))
    return tuple(found)


def _element(name: str) -> tuple[int, str]:
    if name in _ELEMENT_TYPES:
        return _ELEMENT_TYPES[name]
    small_float = re.match(r"f([468])e\d", name)
    return (int(small_float.group(1)), f"float{name[1:]}".replace("e", "_e", 1)) if small_float else (0, name)


def _parse_instruction(line: str) -> Instruction | None:
    start = _INSTRUCTION.match(line)
    if not start:
        return None
    rest = _COMMENT.sub("", line[start.end() :])
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ") - 1
    shape, rest = rest[: end + 1], rest[end + 1 :].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    arguments, attributes = rest[opening + 1 : closing], rest[closing + 1 :]
    op_name = re.search(r'op_name="((?:\\.|[^"\\])*)"', attributes)
    return Instruction(
        name=start.group(2),
        shape=shape,
        opcode=rest[:opening],
        operands=_operands(arguments),
        arguments=arguments,
        attributes=_METADATA.sub("", attributes),
        op_name=op_name.group(1) if op_name else "",
        is_root=bool(start.group(1)),
    )


def _operands(arguments: str) -> tuple[str, ...]:
    """Names in `%a, %b`, or in the typed form `f32[8,4]{1,0} %a, f32[] %b`."""
    if "%" in arguments:
        return tuple(re.findall(r"%([^\s,()]+)", arguments))
    return tuple(word.split()[-1] for word in arguments.split(",") if word.strip())


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`; quoted text does not count."""
    depth, quoted = 0, False
    for index in range(opening, len(text)):
        char = text[index]
        if char == '"':
            quoted = not quoted
        elif not quoted and char == "(":
            depth += 1
        elif not quoted and char == ")":
            depth -= 1
            if not depth:
                return index
    return len(text) - 1


def _num_devices(header: str) -> int:
    counts = [re.search(rf"\b{key}=(\d+)", header) for key in ("num_partitions", "replica_count")]
    return math.prod(int(count.group(1)) for count in counts if count)
