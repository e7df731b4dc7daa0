"""One shuffled order of the samples that all processes share, and the point up to which it has been used.

    epoch 2, seed 7     7 1 4 0 | 9 3 8 2 5 6
                        used      the rest, dealt to however many processes there are now
                        offset=4

A point in this order means the same under every number of processes, so it is all that a checkpoint has to remember.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpar._errors import BatchError

DataState = dict[str, Any]
NUM_FIRST = 4


class SharedOrder:
    """The order of each epoch, from `seed` and its number, and the `offset` from which this epoch is read."""

    def __init__(self, length: int, *, shuffle: bool, seed: int) -> None:
        self.length = length
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.offset = 0
        self._made: tuple[int, np.ndarray] | None = None  # of one epoch: a shuffle of millions takes a while

    def set_epoch(self, epoch: int) -> None:
        """The epoch to read: from its begin, unless a state of this very epoch was loaded."""
        if epoch != self.epoch:
            self.epoch, self.offset = epoch, 0

    def samples(self) -> np.ndarray:
        """All samples of this epoch in order, int64[length]."""
        if self._made is None or self._made[0] != self.epoch:
            self._made = (self.epoch, self._shuffled(self.epoch))
        return self._made[1]

    def _shuffled(self, epoch: int) -> np.ndarray:
        if self.shuffle:
            return np.random.default_rng([self.seed, epoch]).permutation(self.length)
        return np.arange(self.length)

    def state(self, offset: int) -> DataState:
        """What `load` needs to go on after the first `offset` samples of this epoch: JSON, the same on all ranks."""
        first = self.samples()[:NUM_FIRST].tolist()  # another release of NumPy may shuffle otherwise
        return {"epoch": self.epoch, "offset": offset, **self._made_of(), "first_samples": first}

    def _made_of(self) -> DataState:
        return {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}

    def load(self, state: Mapping[str, Any], *, caller: str) -> None:
        """Goes to the state's epoch and offset.

        Raises:
            BatchError: It is no state, or one of another order; nothing has changed then.
        """
        _check_form(state, made_of=self._made_of(), caller=caller)
        epoch, offset = state["epoch"], state["offset"]
        if offset > self.length:
            raise BatchError(
                f"{caller}: offset={offset} is no point in an order of {self.length} samples. The state was changed"
                " by hand, or its file is damaged."
            )
        samples = self._shuffled(epoch)
        if (first := samples[:NUM_FIRST].tolist()) != list(state["first_samples"]):
            raise BatchError(
                f"{caller}: the same seed={self.seed} and epoch={epoch} make an order that begins with {first} here,"
                f" but with {list(state['first_samples'])} where the state was saved: NumPy {np.__version__} shuffles"
                " otherwise. Go on with the release of NumPy of then, or begin the next epoch with set_epoch."
            )
        self.epoch, self.offset, self._made = epoch, offset, (epoch, samples)


def _check_form(state: object, *, made_of: DataState, caller: str) -> None:
    """The entries are there, are what they should be, and speak of this order."""
    if not isinstance(state, Mapping):
        raise BatchError(f"{caller}: a state is the dict that state_dict returned, not {state!r}.")
    names = ("epoch", "offset", *made_of, "first_samples")
    if missing := [name for name in names if name not in state]:
        raise BatchError(
            f"{caller}: the state has no {', '.join(map(repr, missing))}; it has {sorted(state)}. Pass all of what"
            " state_dict returned."
        )
    for name in ("epoch", "offset"):
        if type(state[name]) is not int or state[name] < 0:
            raise BatchError(f"{caller}: {name!r} of the state must be a count, not {state[name]!r}.")
    differ = [
        f"{name}={state[name]!r} (here {here!r})" for name, here in made_of.items() if state[name] != here
    ]
    if differ:
        raise BatchError(
            f"{caller}: the state is of another order, with {', '.join(differ)}. It says how far one order has been"
            " used, so data set, seed and shuffle must be those it was saved with; only the number of processes and"
            " the size of a batch may change."
        )
