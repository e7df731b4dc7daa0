"""Which process reads which sample: every W-th of one shuffled order that all processes share.

    10 samples, 4 replicas, not shuffled          mask (drop_last=False)
    rank 0   0 4 8                                T T T
    rank 1   1 5 9                                T T T
    rank 2   2 6 0   <- wrapped round             T T F     counts once in an evaluation
    rank 3   3 7 1   <- wrapped round             T T F

All ranks read equally many, because they step together; what is read twice is masked.
"""

import math
from collections.abc import Iterator, Sized

import numpy as np

from jaxpar._errors import BatchError
from jaxpar.mesh import get_rank, get_world_size


class DistributedSampler:
    """Indices of the samples that this process reads, in order (rows A1, A2, A4).

    PyTorch: `torch.utils.data.DistributedSampler`; the same rules and the same split, another shuffle.

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
        self.length = dataset_or_length if isinstance(dataset_or_length, int) else len(dataset_or_length)
        self.num_replicas = get_world_size() if num_replicas is None else num_replicas
        self.rank = get_rank() if rank is None else rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        if self.num_replicas < 1 or self.length < 0:
            raise BatchError(
                f"DistributedSampler: cannot split {self.length} samples among num_replicas={self.num_replicas}."
                " Both are counts; num_replicas is at least 1."
            )
        if not 0 <= self.rank < self.num_replicas:
            raise BatchError(
                f"DistributedSampler: rank={self.rank} is not one of num_replicas={self.num_replicas}: ranks are 0"
                f" to {self.num_replicas - 1}. Leave both out to take them from init_process_group."
            )

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass; without it every pass has the same order (row A2)."""
        self.epoch = epoch

    def __len__(self) -> int:
        """How many samples this process reads in one epoch: the same on all."""
        exact = self.length / self.num_replicas
        return math.floor(exact) if self.drop_last else math.ceil(exact)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def indices(self) -> np.ndarray:
        """The indices of this epoch as one array int64[len(self)], to gather a whole data set at once."""
        if self.length == 0:
            return np.empty(0, np.int64)
        order = np.arange(self.length)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.length)
        return order[self._positions() % self.length]

    def mask(self) -> np.ndarray:
        """bool[len(self)]: False where the sample repeats one that is read elsewhere, to reach equal lengths.

        Over all ranks each sample is True exactly once, so masked sums and counts are those of the data set.
        """
        return self._positions() < self.length

    def _positions(self) -> np.ndarray:
        """Positions in the shared order, which starts again where it ends."""
        return self.rank + self.num_replicas * np.arange(len(self))
