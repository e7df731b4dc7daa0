"""Iterate in lock step over processes that have different numbers of batches.

    rank 0 has 3 batches      a   b   c              mask T   T   T
    rank 1 has 2 batches      d   e   (e again)      mask T   T   F
                              |   |   |
    all processes take 3 steps, and every sample counts once

A process that stopped early would leave the others waiting in a collective for ever.
"""

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import jax
import numpy as np

from jaxpar._errors import BatchError
from jaxpar._pytree import PyTree
from jaxpar.data._leaves import num_rows
from jaxpar.data._pad import pad_batch
from jaxpar.mesh import all_gather_object


def join(
    batches: Iterable[PyTree],
    *,
    like: PyTree | None = None,
    timeout_s: float | None = None,
) -> Iterator[tuple[PyTree, np.ndarray]]:
    """Yields this process's batches, then masked fillers, until every process has come to its end (row P17).

    Every process takes equally many steps, with batches of one size: that of the largest first batch. With a loss
    that counts (`Mean((losses * mask).sum(), mask.sum())`) the mean is over the real samples of all processes, so a
    rank that has ended counts for nothing: PyTorch's `join(divide_by_initial_world_size=False)`.

    If all iterables have a length, the processes meet once (in the job's store, a millisecond); otherwise before
    every batch.

    Args:
        batches: This process's batches: pytrees of host arrays [n, ...].
        like: A batch to fill with, for a process that may have none at all.
        timeout_s: Deadline for each meeting; default the `timeout_s` of `init_process_group`.

    Yields:
        (batch, mask): leaves [size, ...], and bool[size], all False in a filler.

    Raises:
        BatchError: A process has neither a batch nor `like` (on every process), or a batch larger than the first.
        ProcessGroupError: Some ranks did not come in time.

    Example:
        >>> import numpy as np
        >>> from jaxpar.data import join
        >>> [(batch.tolist(), mask.tolist()) for batch, mask in join([np.array([1, 2]), np.array([3])])]
        [([1, 2], [True, True]), ([3, 3], [True, False])]
    """
    length = len(batches) if isinstance(batches, Sized) else None
    source = iter(batches)
    batch = next(source, None)
    template = like if batch is None else batch
    said = [length, None if template is None else num_rows(template, caller="join")]
    all_said = all_gather_object(said, timeout_s=timeout_s)
    size = _common_size([rows for _, rows in all_said])
    filler = jax.tree.map(np.asarray, template)
    lengths = [length for length, _ in all_said]
    num_steps = None if None in lengths else max(lengths)
    step = 0
    while _goes_on(step, num_steps, batch is not None, timeout_s):
        if batch is None:
            yield pad_batch(filler, size)[0], np.zeros(size, bool)
        else:
            yield _filled(batch, size, step)
            batch = next(source, None)
        step += 1
    if batch is not None:
        raise BatchError(
            f"join: the iterable says it has {length} batches but yields more. Its len() must be right: all processes"
            " have planned their steps by it."
        )


def _goes_on(step: int, num_steps: int | None, has_batch: bool, timeout_s: float | None) -> bool:
    if num_steps is not None:
        return step < num_steps
    return any(all_gather_object(has_batch, timeout_s=timeout_s))


def _common_size(rows: list[int | None]) -> int:
    empty = [rank for rank, n in enumerate(rows) if n is None]
    if empty:
        raise BatchError(
            f"join: ranks {empty} have no batch at all and nothing to take the shapes of a filler from. Pass like=, a"
            " batch with the right leaves, shapes and dtypes."
        )
    return max(n for n in rows if n is not None)


def _filled(batch: Any, size: int, step: int) -> tuple[PyTree, np.ndarray]:
    rows = num_rows(batch, caller="join")
    if rows > size:
        raise BatchError(
            f"join: batch {step} has {rows} samples, more than the largest first batch ({size}). All steps have one"
            " size, so that one program serves them all; put the largest batch first."
        )
    return pad_batch(batch, size)
