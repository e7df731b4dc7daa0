"""Which rows of each global batch this process reads: the same global batches under any number of processes.

    order 7 1 4 0 9 3 8 2, global batch of 3        1 position     2 positions        3 positions
    batch 0                                         7 1 4          7 1 | 4 -          7 | 1 | 4
    batch 1                                         0 9 3          0 9 | 3 -          0 | 9 | 3
    batch 2, the rest                               8 2 -          8 2 | - -          8 | 2 | -

Rows marked - are there so that every position has equally many: they repeat the batch's last sample, and the mask is
False. A masked mean is therefore that of the same samples, whatever the layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar._errors import BatchError
from jaxpar.data._order import DataState, SharedOrder


@dataclass(frozen=True, eq=False)
class BatchRows:
    """This process's rows of one global batch.

    Args:
        indices: int64[n], samples of the data set.
        mask: bool[n], False where a row only fills up.
        state: Where to go on once this batch has been trained on: JSON, the same on all processes.

    Example:
        >>> from jaxpar.data import DistributedSampler
        >>> rows = DistributedSampler(10, num_replicas=2, rank=1, shuffle=False).batches(4)[2]
        >>> rows.indices.tolist(), rows.mask.tolist(), rows.state["offset"]
        ([9, 9], [False, False], 10)
    """

    indices: np.ndarray
    mask: np.ndarray
    state: DataState


@dataclass(frozen=True, eq=False)
class BatchPlan(Sequence[BatchRows]):
    """The batches of one pass, from a point in the shared order to the end of its epoch.

    Args:
        samples: int64[length], the shared order of the epoch.
        begin: The state at which the pass begins.
        global_batch_size: Samples of all processes in one step.
        rows: int64[n], which rows of a global batch are this process's.
        drop_last: Leave out a last batch that is not full.
    """

    samples: np.ndarray
    begin: DataState
    global_batch_size: int
    rows: np.ndarray
    drop_last: bool

    def __len__(self) -> int:
        left = len(self.samples) - self.begin["offset"]
        return left // self.global_batch_size if self.drop_last else -(-left // self.global_batch_size)

    def __iter__(self) -> Iterator[BatchRows]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> BatchRows:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        first = self.begin["offset"] + index % len(self) * self.global_batch_size
        end = min(first + self.global_batch_size, len(self.samples))
        positions = first + self.rows
        indices = self.samples[np.minimum(positions, end - 1)]
        return BatchRows(indices, positions < end, self.begin | {"offset": end})


def plan_batches(
    order: SharedOrder,
    global_batch_size: int,
    *,
    positions: Sequence[int],
    num_positions: int,
    multiple_of: int = 1,
    drop_last: bool,
    caller: str,
) -> BatchPlan:
    """Deals the rest of an order's epoch to the positions on the batch axes, of which this process feeds some.

    Raises:
        BatchError: A size that is no count.
    """
    for name, size in (("global_batch_size", global_batch_size), ("rows_multiple_of", multiple_of)):
        if size < 1:
            raise BatchError(f"{caller}: {name}={size}, but it is a number of rows, at least 1.")
    each = -(-global_batch_size // (num_positions * multiple_of)) * multiple_of
    rows = np.concatenate([np.arange(each) + position * each for position in positions])
    return BatchPlan(order.samples(), order.state(order.offset), global_batch_size, rows, drop_last)
