"""Which process reads which sample: every W-th of one shuffled order that all processes share.

    10 samples, 4 replicas, not shuffled          mask (drop_last=False)
    rank 0   0 4 8                                T T T
    rank 1   1 5 9                                T T T
    rank 2   2 6 0   <- wrapped round             T T F     counts once in an evaluation
    rank 3   3 7 1   <- wrapped round             T T F

All ranks read equally many, because they step together; what is read twice is masked. After a restart with other
ranks the rest of the order is split the same way, from the point up to which all ranks together had used it:

    after 1 sample each, 0 1 2 3 are used; on 2 replicas      rank 0   4 6 8
                                                              rank 1   5 7 9
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from jaxpar._errors import BatchError
from jaxpar.data._order import DataState, SharedOrder
from jaxpar.data._plan import BatchRows, plan_batches
from jaxpar.mesh import get_rank, get_world_size


class DistributedSampler:
    """Indices of the samples that this process reads, in order (rows A1 to A4).

    PyTorch: `torch.utils.data.DistributedSampler`, the same rules and the same split, another shuffle; and
    `ElasticDistributedSampler`, but with the shuffle kept.

    Args:
        dataset_or_length: The data set (only its length is used), or its length.
        num_replicas: Among how many to split; default the number of processes. Processes that feed the same
            rows of a batch (tensor parallel over processes) are one replica.
        rank: Which of them this is; default this process.
        shuffle: A new order each epoch, the same on all processes, from `seed` and the epoch.
        seed: The same on all processes.
        drop_last: Drop the samples that do not divide, instead of reading some twice.

    Raises:
        BatchError: `rank` is not one of `num_replicas`, or a count is negative.
        ProcessGroupError: One of several processes that has not called `init_process_group`.

    Example:
        >>> from jaxpar.data import DistributedSampler
        >>> sampler = DistributedSampler(10, num_replicas=4, rank=2, shuffle=False)
        >>> list(sampler), sampler.mask().tolist()
        ([2, 6, 0], [True, True, False])
        >>> state = sampler.state_dict(1)  # each of the 4 ranks has trained on 1 sample
        >>> sampler = DistributedSampler(10, num_replicas=2, rank=1, shuffle=False)
        >>> sampler.load_state_dict(state)
        >>> list(sampler)
        [5, 7, 9]
    """

    def __init__(
        self,
        dataset_or_length: Sized | int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        length = dataset_or_length if isinstance(dataset_or_length, int) else len(dataset_or_length)
        self.num_replicas = get_world_size() if num_replicas is None else num_replicas
        self.rank = get_rank() if rank is None else rank
        self.drop_last = drop_last
        if self.num_replicas < 1 or length < 0:
            raise BatchError(
                f"DistributedSampler: cannot split {length} samples among num_replicas={self.num_replicas}."
                " Both are counts; num_replicas is at least 1."
            )
        if not 0 <= self.rank < self.num_replicas:
            raise BatchError(
                f"DistributedSampler: rank={self.rank} is not one of num_replicas={self.num_replicas}: ranks are 0"
                f" to {self.num_replicas - 1}. Leave both out to take them from init_process_group."
            )
        self._order = SharedOrder(length, shuffle=shuffle, seed=seed)

    @property
    def length(self) -> int:
        """Samples of the data set."""
        return self._order.length

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return self._order.epoch

    @property
    def offset(self) -> int:
        """Where in the shared order the next pass begins: 0, or what all ranks had used when the state was saved."""
        return self._order.offset

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass; without it every pass has the same order (row A2).

        A pass covers the whole epoch, except in the epoch of a loaded state, of which it covers the rest.
        """
        self._order.set_epoch(epoch)

    def state_dict(self, num_used: int) -> DataState:
        """Where to go on once every rank has used `num_used` samples of this pass: JSON, the same on all ranks.

        You say how many, because an iterator that was read ahead (prefetching, worker processes) does not know what
        was trained on: steps times this process's batch size. `DataLoader` counts for you.

        Raises:
            BatchError: `num_used` is more than this process reads in this pass, or negative.
        """
        if not 0 <= num_used <= len(self):
            raise BatchError(
                f"DistributedSampler.state_dict: num_used={num_used}, but rank {self.rank} of {self.num_replicas}"
                f" reads {len(self)} samples in this pass, which began at sample {self.offset} of the {self.length}"
                f" of epoch {self.epoch}. Count this process's samples since then, not those of all ranks."
            )
        return self._order.state(min(self.offset + num_used * self.num_replicas, self.length))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the state was saved, among any number of replicas: the next pass is the rest of that epoch.

        Raises:
            BatchError: It is the state of another data set, seed or shuffle, or none at all.
        """
        self._order.load(state, caller="DistributedSampler.load_state_dict")

    def __len__(self) -> int:
        """How many samples this process reads in this pass: the same on all."""
        exact = (self.length - self.offset) / self.num_replicas
        return math.floor(exact) if self.drop_last else math.ceil(exact)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def indices(self) -> np.ndarray:
        """The indices of this pass as one array int64[len(self)], to gather a whole data set at once."""
        if self.length == 0:
            return np.empty(0, np.int64)
        return self._order.samples()[self._positions() % self.length]

    def batches(self, global_batch_size: int) -> Sequence[BatchRows]:
        """The rest of the epoch in global batches: this rank's rows of each, a block of neighbours in the batch.

        Another split than that of `indices`, which deals single samples in turn: joined in the order of the ranks
        (`global_batch`), the rows are the batch of one process, under any number of ranks. If ranks do not divide a
        batch, or for the last one, rows are filled up and masked.

        Args:
            global_batch_size: Samples of all ranks in one step.

        Raises:
            BatchError: The size is no count.
        """
        return plan_batches(
            self._order,
            global_batch_size,
            positions=[self.rank],
            num_positions=self.num_replicas,
            drop_last=self.drop_last,
            caller="DistributedSampler.batches",
        )

    def mask(self) -> np.ndarray:
        """bool[len(self)]: False where the sample repeats one that is read elsewhere, to reach equal lengths.

        Over all ranks each sample is True exactly once, so masked sums and counts are those of the data set.
        """
        return self._positions() < self.length

    def _positions(self) -> np.ndarray:
        """Positions in the shared order, which starts again where it ends."""
        return self.offset + self.rank + self.num_replicas * np.arange(len(self))
