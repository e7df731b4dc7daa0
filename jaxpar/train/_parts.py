"""What a step is made of, whichever engine runs it."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxpar._errors import BatchError
from jaxpar._pytree import PyTree, leaf_name
from jaxpar.fsdp._zero1 import Cut
from jaxpar.train._local import LocalStep
from jaxpar.train._replicas import Replicas
from jaxpar.train._variables import Variables


@dataclass(frozen=True, eq=False)
class Parts:
    """What `TrainStep` found out when it was built.

    Args:
        mesh: of the whole job.
        model: the model's variables.
        optimizer: the optimizer's variables.
        local: what one device does.
        cuts: for each parameter how its optimizer state is cut, if that is and the parameter is not.
        batch_axes: axes that split the batch.
        clip: largest norm to let through, and which norm; None: gradients are not clipped.
        options: in words, to compare processes.
        replicas: where replicas lie that differ; None: there is one model.
    """

    mesh: Mesh
    model: Variables
    optimizer: Variables
    local: LocalStep
    cuts: tuple[Cut | None, ...]
    batch_axes: tuple[str, ...]
    clip: tuple[float, float] | None
    options: str
    replicas: Replicas | None = None


def live_spec(sharding: Any) -> PartitionSpec:
    """The spec without axes of size 1: nothing varies over them, so they cost no collective."""

    def live(entry: Any) -> Any:
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        return tuple(name for name in names if sharding.mesh.shape[name] > 1) or None

    return PartitionSpec(*(live(entry) for entry in sharding.spec))


def check_dealt_rows(batch: PyTree, num_ranks: int, num_parts: int, batch_axes: tuple[str, ...]) -> int:
    """Rows of each rank, which need not divide into microbatches if every array has as many.

    Raises:
        BatchError: a leaf has no rows; rows do not divide into ranks, are fewer than microbatches, or differ between arrays and
            do not divide.
    """
    rows = _numbers_of_rows(batch)
    if len(rows) != 1:
        check_rows(batch, num_ranks, num_parts, batch_axes)
        return num_parts
    (size,) = rows
    if size == 0 or size % num_ranks:
        check_rows(batch, num_ranks, 1, batch_axes)
    if size // num_ranks < num_parts:
        raise BatchError(
            f"a batch of {size} rows has {size // num_ranks} for each of {num_ranks} ranks (batch_axes={batch_axes}), fewer than "
            f"the {num_parts} microbatches of a step, and each has at least one. Give {num_ranks * num_parts} rows or more, or write "
            f"pipeline(..., n_microbatches={max(size // num_ranks, 1)})."
        )
    return size // num_ranks


def check_rows(batch: PyTree, num_ranks: int, accumulate: int, batch_axes: tuple[str, ...]) -> None:
    rows = _numbers_of_rows(batch)
    for size in sorted(rows):
        if size == 0 or size % (num_ranks * accumulate):
            raise BatchError(
                f"a batch of {size} rows does not divide into {num_ranks} ranks (batch_axes={batch_axes}) x {accumulate} "
                f"microbatches: {size} % {num_ranks * accumulate} = {size % (num_ranks * accumulate)}. Pad it with "
                f"batch, mask = jaxpar.data.pad_batch(batch, {-(-size // (num_ranks * accumulate)) * num_ranks * accumulate}) "
                f"and return jaxpar.Mean((losses * mask).sum(), mask.sum())."
            )


def _numbers_of_rows(batch: PyTree) -> set[int]:
    """The sizes of dim 0 of all leaves.

    Raises:
        BatchError: a leaf is a scalar.
    """
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    for path, x in leaves:
        if not x.ndim:
            raise BatchError(
                f"TrainStep: {leaf_name(path) or 'the batch'} is a scalar ({x.dtype}), and of every array in the batch each device "
                f"takes its own rows. Repeat it for each row, or give it to the loss function: functools.partial(loss_fn, scale=2.0)."
            )
    return {x.shape[0] for _, x in leaves}
