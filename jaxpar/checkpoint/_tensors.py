"""`Tensors`: how an array of a model lies in a file that others wrote or shall read.

    array f32[D, 12]  =  | q q q q k v | q q q q k v |     Tensors(("q", "k", "v"), permute=(1, 0), widths=(4, 1, 1))
    tensors in the file  q f32[8, D]   k f32[2, D]   v f32[2, D]

A part of the array is made of runs, each of which is contiguous in one tensor: only these are read.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from jaxpar._errors import CheckpointError

ItemT = TypeVar("ItemT")
Index = tuple[slice, ...]
Read = Callable[[str, Index], np.ndarray]


@dataclass(frozen=True)
class Tensors:
    """The tensors of a file that make up one array of a model: named otherwise, transposed, or joined.

    Args:
        names: of the tensors in the file; one may be given as a string.
        permute: dim d of the array is dim `permute[d]` of each tensor: `(1, 0)` for a `torch.nn.Linear`'s weight. None: the same.
        widths: for several tensors, how many entries along `dim` come from each in turn, again and again until the array is full:
            the whole size of each for a plain join.
        dim: the dim of the array along which they are joined.

    Raises:
        CheckpointError: names and widths do not fit each other, or `permute` is no permutation.

    Example:
        >>> from jaxpar.checkpoint import Tensors
        >>> qkv = Tensors(("q", "k", "v"), permute=(1, 0), widths=(4, 1, 1))
        >>> qkv.shapes((16, 12))
        {'q': (8, 16), 'k': (2, 16), 'v': (2, 16)}
    """

    names: str | tuple[str, ...]
    permute: tuple[int, ...] | None = None
    widths: tuple[int, ...] = ()
    dim: int = -1

    def __post_init__(self) -> None:
        names = self.tensors
        if not names or len(set(names)) < len(names) or len(names) != max(1, len(self.widths)):
            raise CheckpointError(
                f"{self}: {len(names)} tensors and {len(self.widths)} widths. Several tensors need different names and a width each: "
                f"Tensors(('q', 'k', 'v'), widths=(64, 16, 16))."
            )
        if any(width < 1 for width in self.widths):
            raise CheckpointError(f"{self}: widths are at least 1.")
        if self.permute is not None and sorted(self.permute) != list(range(len(self.permute))):
            raise CheckpointError(
                f"{self}: permute={self.permute} does not name each dim once. Write (1, 0) to transpose a matrix."
            )

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names as a tuple."""
        return (self.names,) if isinstance(self.names, str) else self.names

    def shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors, for an array of this shape.

        Raises:
            CheckpointError: no tensors can make such an array.
        """
        self._check(shape)
        return {
            name: self._order(one) for name, one in zip(self.tensors, self._own_shapes(shape), strict=True)
        }

    def views(self, array: np.ndarray) -> Iterator[np.ndarray]:
        """The elements of each tensor in its order, without a copy; a dim that is joined appears as two."""
        theirs = _inverse(self.permute or range(array.ndim))
        if not self.widths:
            yield array.transpose(theirs)
            return
        dim = self.dim % array.ndim
        turns = array.reshape(*array.shape[:dim], -1, sum(self.widths), *array.shape[dim + 1 :])
        two = [d for own in theirs for d in ((dim, dim + 1) if own == dim else (own + (own > dim),))]
        start = 0
        for width in self.widths:
            part = turns[(slice(None),) * (dim + 1) + (slice(start, start + width),)]
            yield part.transpose(two)
            start += width

    def read(self, shape: Sequence[int], index: Index, read: Read, dtype: np.dtype) -> np.ndarray:
        """The part `index` of the array.

        Args:
            shape: of the array.
            index: slices with start and stop, one for each dim.
            read: gives the part of a tensor.
            dtype: of the result.
        """
        out = np.empty([at.stop - at.start for at in index], dtype)
        if not out.size:
            return out
        if not self.widths:
            out[...] = self._read(self.tensors[0], index, read)
            return out
        dim = self.dim % len(shape)
        for number, here, there in self._runs(index[dim]):
            at = (*index[:dim], there, *index[dim + 1 :])
            out[(slice(None),) * dim + (here,)] = self._read(self.tensors[number], at, read)
        return out

    def _read(self, name: str, index: Index, read: Read) -> np.ndarray:
        if self.permute is None:
            return read(name, index)
        return read(name, self._order(index)).transpose(self.permute)

    def _runs(self, wanted: slice) -> Iterator[tuple[int, slice, slice]]:
        """Which tensor gives what: its number, where it goes in the part, where it lies in the tensor."""
        starts = np.concatenate([[0], np.cumsum(self.widths)]).tolist()
        at = wanted.start
        while at < wanted.stop:
            turn, offset = divmod(at, starts[-1])
            number = next(i for i in range(len(self.widths)) if offset < starts[i + 1])
            length = min(starts[number + 1] - offset, wanted.stop - at)
            first = turn * self.widths[number] + offset - starts[number]
            yield number, slice(at - wanted.start, at - wanted.start + length), slice(first, first + length)
            at += length

    def _order(self, ours: Sequence[ItemT]) -> tuple[ItemT, ...]:
        """One item for each dim of the array, as one for each dim of a tensor."""
        return tuple(ours[d] for d in _inverse(self.permute)) if self.permute else tuple(ours)

    def _own_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        if not self.widths:
            return [tuple(shape)]
        dim = self.dim % len(shape)
        turns = shape[dim] // sum(self.widths)
        return [(*shape[:dim], turns * width, *shape[dim + 1 :]) for width in self.widths]

    def _check(self, shape: Sequence[int]) -> None:
        if self.permute is not None and len(self.permute) != len(shape):
            raise CheckpointError(
                f"{self}: permute={self.permute} is not for an array of shape {list(shape)}."
            )
        if not self.widths:
            return
        if not -len(shape) <= self.dim < len(shape):
            raise CheckpointError(f"{self}: dim={self.dim} is no dim of an array of shape {list(shape)}.")
        if shape[self.dim] % sum(self.widths):
            raise CheckpointError(
                f"{self}: dim {self.dim} of shape {list(shape)} is not a multiple of {' + '.join(map(str, self.widths))} = "
                f"{sum(self.widths)}, the widths that take turns along it."
            )


def _inverse(permute: Sequence[int]) -> list[int]:
    """Dim e of a tensor is dim `_inverse(permute)[e]` of the array."""
    return sorted(range(len(permute)), key=lambda d: permute[d])


Rule = str | Tensors | None
Names = Callable[[str], Rule] | Mapping[str, Rule]


def rule_of(names: Names | None, name: str) -> Tensors | None:
    """How the array of this name lies in files; None: not at all."""
    if names is None:
        return Tensors(name)
    found = names.get(name, name) if isinstance(names, Mapping) else names(name)
    return Tensors(found) if isinstance(found, str) else found


def whole(shape: Sequence[int]) -> Index:
    """The index of a whole array."""
    return tuple(slice(0, size) for size in shape)


def blocks(view: np.ndarray, max_bytes: int) -> Iterator[np.ndarray]:
    """A view cut into parts of at most so many bytes (or one element), in the order of its elements."""
    if view.nbytes <= max_bytes or view.ndim == 0:
        yield view
        return
    num_rows = max_bytes // (view.nbytes // len(view))
    if num_rows == 0:
        for row in view:
            yield from blocks(row, max_bytes)
        return
    for start in range(0, len(view), num_rows):
        yield view[start : start + num_rows]


def num_bytes(shape: Sequence[int], dtype: np.dtype) -> int:
    """What an array takes."""
    return math.prod(shape) * dtype.itemsize
