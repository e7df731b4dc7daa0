"""Host batches out of a data set: columns are indexed, samples are read one by one and stacked.

{"x": [N, 3], "y": [N]}       x[indices], y[indices]
dataset[i] -> (x [3], y)      stack(x for i in indices), stack(y ...)
"""

import sys
from collections.abc import Generator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxpar._errors import BatchError
from jaxpar._pytree import PyTree
from jaxpar.data._grain import GrainSource
from jaxpar.data._leaves import num_rows
from jaxpar.data._plan import BatchPlan


class Source(Protocol):
    """What a loader reads from."""

    def __len__(self) -> int:
        """Samples."""
        ...

    def batches(self, plan: BatchPlan) -> Generator[PyTree, None, None]:
        """One host batch for each of the plan's, in order; closed (`close()`) if the plan is left early."""
        ...


def as_source(dataset: Any) -> Source:
    """Chooses by type: a Grain source or data set, an array or a dict, tuple or list of arrays, or samples by index.

    Raises:
        BatchError: It has no length or cannot be indexed, or arrays disagree on their length.
    """
    if isinstance(dataset, GrainSource):
        return dataset
    grain = sys.modules.get("grain")  # who has a data set of Grain's has imported it
    if isinstance(dataset, (getattr(grain, "MapDataset", ()), getattr(grain, "IterDataset", ()))):
        return GrainSource(dataset)
    if isinstance(dataset, (np.ndarray, jax.Array, dict, tuple, list)):
        return _Columns(dataset)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise BatchError(
            f"DataLoader: a {type(dataset).__name__} has no len() or cannot be indexed, so its samples cannot be dealt"
            " to processes. Give arrays, a data set with dataset[i], or, for a stream that splits itself,"
            " prefetch_to_device(stream, mesh, batch_axes)."
        )
    return _Samples(dataset)


class _Columns:
    def __init__(self, columns: PyTree) -> None:
        self._num_rows = num_rows(columns, caller="DataLoader")
        self._columns = jax.tree.map(np.asanyarray, columns)  # memory maps stay what they are

    def __len__(self) -> int:
        return self._num_rows

    def batches(self, plan: BatchPlan) -> Generator[PyTree, None, None]:
        for rows in plan:
            yield jax.tree.map(lambda column: np.asarray(column[rows.indices]), self._columns)  # noqa: B023


class _Samples:
    """PyTorch's map-style data sets, and `grain.sources`; `__getitems__` reads many at once, where it exists."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def batches(self, plan: BatchPlan) -> Generator[PyTree, None, None]:
        for rows in plan:
            yield stack(self._read(rows.indices.tolist()))

    def _read(self, indices: list[int]) -> Sequence[PyTree]:
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__(indices)
        return [self._dataset[i] for i in indices]


def stack(samples: Sequence[PyTree]) -> PyTree:
    """Leaves [...] of n samples to leaves [n, ...]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *samples)
