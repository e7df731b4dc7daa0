"""Which dim of which parameter is cut when a layer is split by columns (outputs) or by rows (inputs).

                kernel                    columns          rows             bias
Linear          [in, out]                 out              in               [out]
LinearGeneral   [in..., out...]           first out        first in         [out...]
Einsum          letters                   first new one    first summed     its letters
Conv            [window..., in, out]      out              in               [out]
Embed           [rows, features]          features         rows             -
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar.mesh import Shard


@dataclass(frozen=True)
class Cut:
    """Where one parameter is split.

    Args:
        name: the module's attribute.
        dim: the dim that is split.
    """

    name: str
    dim: int


@dataclass(frozen=True)
class Columns:
    """A layer split by its outputs.

    Args:
        cuts: the parameters that are split.
        dim: dim of the output along which the ranks' parts lie, from the end.
        reads: length of the input's dims that it sums over, by dim from the end.
    """

    cuts: tuple[Cut, ...]
    dim: int
    reads: dict[int, int]


@dataclass(frozen=True)
class Rows:
    """A layer split by its inputs.

    Args:
        cuts: the parameters that are split.
        dim: dim of the input along which the ranks' parts lie, from the end.
        size: whole length of that dim.
    """

    cuts: tuple[Cut, ...]
    dim: int
    size: int


LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.Embed)


def columns_of(name: str, module: Any) -> Columns:
    """How the layer is split by its outputs.

    Raises:
        ParallelizeError: not such a layer, or one that cannot be split that way.
    """
    match module:
        case nnx.Linear():
            kernel, dim, reads = 1, -1, {-1: module.in_features}
        case nnx.LinearGeneral():
            _check_no_batch_axis(name, module)
            kernel, dim = len(module.in_features), -len(module.out_features)
            reads = dict(zip(module.axis, module.in_features, strict=True)) if max(module.axis) < 0 else {}
        case nnx.Einsum():
            kernel, dim, reads = _einsum_columns(name, module)
        case nnx.Conv():
            _check_no_groups(name, module)
            kernel, dim, reads = module.kernel.get_value().ndim - 1, -1, {-1: module.in_features}
        case nnx.Embed():
            return Columns((Cut("embedding", 1),), -1, {})
        case _:
            raise _unsupported(name, module, "ColwiseParallel")
    cuts = [Cut("kernel", kernel)]
    if getattr(module, "bias", None) is not None:
        cuts.append(Cut("bias", _bias_dim(module)))
    return Columns(tuple(cuts), dim, reads)


def rows_of(name: str, module: Any) -> Rows:
    """How the layer is split by its inputs; its bias stays whole and is added once.

    Raises:
        ParallelizeError: not such a layer, or one that cannot be split that way.
    """
    match module:
        case nnx.Linear():
            return Rows((Cut("kernel", 0),), -1, module.in_features)
        case nnx.LinearGeneral():
            _check_no_batch_axis(name, module)
            if sorted(module.axis) != list(range(-len(module.axis), 0)):
                raise ParallelizeError(
                    f"parallelize_module: RowwiseParallel splits {name}, an nnx.LinearGeneral, along the first of the dims that it "
                    f"sums over, which must be the last ones of its input; it has axis={module.axis}. Write "
                    f"axis={tuple(range(-len(module.axis), 0))}."
                )
            return Rows((Cut("kernel", 0),), -len(module.axis), module.in_features[0])
        case nnx.Einsum():
            return _einsum_rows(name, module)
        case nnx.Conv():
            _check_no_groups(name, module)
            return Rows((Cut("kernel", module.kernel.get_value().ndim - 2),), -1, module.in_features)
        case nnx.Embed():
            return Rows((Cut("embedding", 0),), -1, module.num_embeddings)
    raise _unsupported(name, module, "RowwiseParallel")


def add_bias(module: Any, bias: jax.Array, y: jax.Array) -> jax.Array:
    """The layer's bias, whole or this rank's part, added to an output that lacks it."""
    if isinstance(module, nnx.Einsum):
        _, _, result = _letters(module.einsum_str)
        letters = _bias_letters(module)
        at = iter(bias.shape)
        bias = bias.reshape([next(at) if letter in letters else 1 for letter in result])
    return y + bias.astype(y.dtype)


def promoted(module: nnx.Linear, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Input and kernel in the dtype that the layer computes in."""
    return module.promote_dtype((x, module.kernel.get_value()), dtype=module.dtype)


def check_overlap(name: str, module: Any, option: str, layout: Any) -> None:
    """Refuses `overlap=True` where there is nothing to overlap.

    Raises:
        ParallelizeError: no plain linear layer, or its collective is no gather or scatter.
    """
    if not isinstance(module, nnx.Linear) or not isinstance(layout, Shard):
        raise ParallelizeError(
            f"parallelize_module: overlap=True on {name} ({type(module).__name__}, {option}={layout!r}): the collective of an nnx.Linear is "
            f"cut into steps if it gathers or scatters. Write {option}=Shard(1) (sequence parallel), or drop overlap."
        )


def _bias_dim(module: Any) -> int:
    if not isinstance(module, nnx.Einsum):
        return 0
    read, kernel, result = _letters(module.einsum_str)
    new = [letter for letter in kernel if letter in result and letter not in read]
    return _bias_letters(module).index(new[0])


def _bias_letters(module: Any) -> list[str]:
    _, kernel, result = _letters(module.einsum_str)
    return [letter for letter in result if letter in kernel]


def _einsum_columns(name: str, module: nnx.Einsum) -> tuple[int, int, dict[int, int]]:
    read, kernel, result = _letters(module.einsum_str)
    new = [letter for letter in kernel if letter in result and letter not in read]
    if not new:
        raise ParallelizeError(
            f"parallelize_module: ColwiseParallel cannot split {name}, nnx.Einsum({module.einsum_str!r}): no letter of its kernel is "
            f"a new dim of the result."
        )
    summed = [letter for letter in kernel if letter in read]
    reads = {read.index(a) - len(read): module.kernel_shape[kernel.index(a)] for a in summed}
    return kernel.index(new[0]), result.index(new[0]) - len(result), reads


def _einsum_rows(name: str, module: nnx.Einsum) -> Rows:
    read, kernel, result = _letters(module.einsum_str)
    summed = [letter for letter in kernel if letter in read and letter not in result]
    if not summed:
        raise ParallelizeError(
            f"parallelize_module: RowwiseParallel cannot split {name}, nnx.Einsum({module.einsum_str!r}): it sums over no letter of its "
            f"kernel."
        )
    dim = kernel.index(summed[0])
    return Rows((Cut("kernel", dim),), read.index(summed[0]) - len(read), module.kernel_shape[dim])


def _letters(einsum_str: str) -> tuple[list[str], list[str], list[str]]:
    """Letters of input, kernel and result; an ellipsis counts as one."""
    sides, result = einsum_str.replace(" ", "").split("->")
    return tuple(list(side.replace("...", ".")) for side in (*sides.split(","), result))  # pyright: ignore


def _check_no_batch_axis(name: str, module: nnx.LinearGeneral) -> None:
    if module.batch_axis:
        raise ParallelizeError(
            f"parallelize_module: {name} is an nnx.LinearGeneral with batch_axis={dict(module.batch_axis)}: a kernel for each batch "
            f"index has no columns or rows in common. Leave it out of the plan."
        )


def _check_no_groups(name: str, module: nnx.Conv) -> None:
    if module.feature_group_count != 1:
        raise ParallelizeError(
            f"parallelize_module: {name} is an nnx.Conv with feature_group_count={module.feature_group_count}: its channels are grouped, "
            f"and a split by channels would cut or mix groups. Leave it out of the plan."
        )


def _unsupported(name: str, module: Any, style: str) -> ParallelizeError:
    kinds = ", ".join(f"nnx.{kind.__name__}" for kind in LAYERS)
    return ParallelizeError(
        f"parallelize_module: {style} does not handle {name}, which is {type(module).__name__}; it handles {kinds}. Name the "
        f"layers inside it, as in {{'{name}.*': {style}()}}."
    )
