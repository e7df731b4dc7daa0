"""Matrix-multiplication FLOPs of HLO instructions, with loops multiplied out.

    dot                   2 * result elements * contracted elements
    convolution           2 * output elements * kernel elements / output features
    fusion, call, while   those of what they call (while: times its trip count); conditional: the dearest branch

XLA:GPU hides matmuls in custom calls (cuBLAS, cuDNN) and in Triton fusions. Elementwise work does not count:
what can hide a collective is matrix work. FLOPs inside other custom calls (Pallas, cuDNN attention) are unknown: 0.
"""

import math
import re

from jaxpar.debug._hlo import Computation, Instruction, Module, array_types
from jaxpar.debug._loops import trip_count

_CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
# (output, kernel) of cuDNN's convolutions, each an operand number or the result (None).
_CUDNN = {
    "__cudnn$convForward": (None, 1),
    "__cudnn$convBiasActivationForward": (None, 1),
    "__cudnn$convBackwardInput": (0, 1),
    "__cudnn$convBackwardFilter": (1, None),
}


def matmul_flops(module: Module, computation: Computation, instruction: Instruction) -> int:
    """FLOPs of one execution of `instruction`, with all that it calls."""
    own = _own_flops(computation, instruction)
    called = [module.computations[name] for name in instruction.called if name in module.computations]
    inner = [sum(matmul_flops(module, part, i) for i in part.instructions) for part in called]
    if instruction.opcode == "conditional":
        return own + max(inner, default=0)
    trips = 1
    if instruction.opcode == "while":
        trips = trip_count(module, computation, instruction) or 1
    return own + trips * sum(inner)


def _own_flops(computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode == "dot":
        return _dot(computation, instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction, None, 1)
    target = instruction.attribute("custom_call_target") if instruction.opcode == "custom-call" else None
    if target in _CUBLAS:
        return _dot(computation, instruction, r'"lhs_contracting_dimensions":\[([\d,"]*)\]')
    if target in _CUDNN:
        return _convolution(computation, instruction, *_CUDNN[target])
    return 0


def _dims(computation: Computation, instruction: Instruction, number: int | None) -> tuple[int, ...]:
    """Dims of an operand, or (None) of the first array of the result."""
    source = instruction if number is None else computation.by_name[instruction.operands[number]]
    return array_types(source.shape)[0].dims


def _dot(computation: Computation, instruction: Instruction, contracting: str) -> int:
    found = re.search(contracting, instruction.attributes)
    lhs = _dims(computation, instruction, 0)
    contracted = [lhs[int(dim)] for dim in re.findall(r"\d+", found.group(1) if found else "")]
    return 2 * math.prod(_dims(computation, instruction, None)) * math.prod(contracted)


def _convolution(
    computation: Computation, instruction: Instruction, output: int | None, kernel: int | None
) -> int:
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    kernel_dims = _dims(computation, instruction, kernel)
    features = kernel_dims[labels.group(1).index("o")] if labels else 1
    return 2 * math.prod(_dims(computation, instruction, output)) * math.prod(kernel_dims) // features
