"""Fill a short batch up to a size that divides, and say which rows are real.

rows a b c  to size 4  ->  rows a b c c,  mask T T T F
"""

import jax
import numpy as np

from jaxpar._errors import BatchError
from jaxpar._pytree import PyTree
from jaxpar.data._leaves import num_rows


def pad_batch(batch: PyTree, size: int) -> tuple[PyTree, np.ndarray]:
    """Fills every leaf of a host batch up to `size` rows; for the last, shorter batch of an epoch.

    The added rows repeat the last real one (zeros if there is none): valid samples for any model, and to be masked
    in the loss, for example `Mean((losses * mask).sum(), mask.sum())`.

    Args:
        batch: Pytree of arrays [n, ...] on the host.
        size: Rows wanted, at least n.

    Returns:
        The batch with leaves [size, ...], and the mask bool[size]: True for the n real rows.

    Raises:
        BatchError: The batch has more rows than `size`, or its leaves disagree.

    Example:
        >>> import numpy as np
        >>> from jaxpar.data import pad_batch
        >>> batch, mask = pad_batch({"x": np.array([1, 2, 3])}, 4)
        >>> batch["x"].tolist(), mask.tolist()
        ([1, 2, 3, 3], [True, True, True, False])
    """
    rows = num_rows(batch, caller="pad_batch")
    if rows > size:
        raise BatchError(
            f"pad_batch: the batch has {rows} samples, more than size={size}. Padding only adds; give the largest"
            f" batch size, size={rows} or more."
        )
    return jax.tree.map(lambda leaf: _fill(np.asarray(leaf), size), batch), np.arange(size) < rows


def _fill(array: np.ndarray, size: int) -> np.ndarray:
    rows = array.shape[0]
    if rows == 0:
        return np.zeros((size, *array.shape[1:]), array.dtype)
    return array[np.minimum(np.arange(size), rows - 1)]
