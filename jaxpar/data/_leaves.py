"""The leading dim of a batch: the one number that all its leaves must agree on."""

import jax
import numpy as np

from jaxpar._errors import BatchError
from jaxpar._pytree import PyTree, leaf_name


def num_rows(batch: PyTree, *, caller: str) -> int:
    """The leading size that all leaves share.

    Raises:
        BatchError: There is no leaf, a leaf has no dim, or leaves disagree.
    """
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    if not leaves:
        raise BatchError(
            f"{caller}: the batch has no arrays. Pass a pytree of arrays, such as {{'tokens': tokens}}."
        )
    shapes = {leaf_name(path) or "batch": np.shape(leaf) for path, leaf in leaves}
    for name, shape in shapes.items():
        if not shape:
            raise BatchError(
                f"{caller}: leaf {name!r} is a scalar, so it has no dim 0 that counts samples. Repeat it for each"
                " sample, or pass it to the loss by functools.partial."
            )
    sizes = {name: shape[0] for name, shape in shapes.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name!r} has {size}" for name, size in sizes.items())
        raise BatchError(
            f"{caller}: the leaves disagree on the number of samples in dim 0: {listed}. Sample i of every leaf must"
            " belong together."
        )
    return next(iter(sizes.values()))
