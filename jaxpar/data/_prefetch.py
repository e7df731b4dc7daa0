"""Batches on their devices before the loop asks for them.

thread     read 1, put 1 | read 2, put 2 | read 3 ...
loop           step 0        | step 1        | step 2 ...
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from jaxpar._errors import BatchError
from jaxpar._pytree import PyTree
from jaxpar.data._background import Background
from jaxpar.data._global_batch import global_batch
from jaxpar.data._input_wait import InputWait
from jaxpar.mesh import MeshLike, axis_size


def prefetch_to_device(
    batches: Iterable[PyTree],
    mesh: MeshLike,
    batch_axes: str | tuple[str, ...],
    *,
    size: int = 2,
) -> "PrefetchIterator":
    """Reads and places the next batches in a thread while the loop is busy with this one; order and errors stay.

    For streams that split themselves: each process feeds its own rows (a Grain pipeline with `ShardOptions`, text from
    one file per process). For data sets by index, `DataLoader` does this and the splitting.

    Args:
        batches: This process's host batches, as for `global_batch`.
        mesh: The mesh of the step.
        batch_axes: Axes over which the samples are split.
        size: Batches made ahead: that many more are in the devices' memory. 0 reads in the loop itself.

    Returns:
        An iterator of global batches; `with` or `close()` ends its thread early.

    Raises:
        BatchError: `size` is negative. What reading or `global_batch` raises comes up in the loop, in the place of
            the batch that failed.

    Example:
        >>> import numpy as np
        >>> from jaxpar.data import prefetch_to_device
        >>> from jaxpar.mesh import init_device_mesh
        >>> host = (np.full(8, i) for i in range(3))
        >>> [int(x[0]) for x in prefetch_to_device(host, init_device_mesh((8,), ("dp",)), "dp")]
        [0, 1, 2]
    """
    check_size(size, caller="prefetch_to_device", name="size")
    axis_size(mesh, batch_axes)  # an unknown axis is told here and not in a thread
    return PrefetchIterator(batches, lambda batch: global_batch(batch, mesh, batch_axes), size)


class PrefetchIterator(Iterator[PyTree]):
    """What `prefetch_to_device` returns: an iterator with a state, a wait and an end.

    Example:
        >>> import numpy as np
        >>> from jaxpar.data import prefetch_to_device
        >>> from jaxpar.mesh import init_device_mesh
        >>> with prefetch_to_device([np.arange(8)], init_device_mesh((8,), ("dp",)), "dp") as batches:
        ...     sums = [int(batch.sum()) for batch in batches]
        >>> sums, sorted(batches.wait_metrics())
        ([28], ['input_wait_s', 'input_wait_share'])
    """

    def __init__(self, batches: Iterable[PyTree], place: Callable[[PyTree], PyTree], size: int) -> None:
        source = iter(batches)
        self._read_state = _state_reader(source) or _state_reader(batches)
        self._state = self._read_state() if self._read_state else None
        self._wait = InputWait()
        self._items = Background(_placed(source, place, self._read_state), size=size, wait=self._wait)

    def __next__(self) -> PyTree:
        batch, self._state = next(self._items)
        return batch

    def state_dict(self) -> Any:
        """The state of the source after the batch that was handed out last, whatever was read ahead since.

        Give it back to the source (`load_state_dict`, Grain's `set_state`) before it is iterated.

        Raises:
            BatchError: The source says no state.
        """
        if self._read_state is None:
            raise BatchError(
                "PrefetchIterator.state_dict: the iterator of batches says no state. It needs a method state_dict(), or"
                " get_state() as Grain's iterators have; DataLoader keeps the state of a data set by index."
            )
        return self._state

    def wait_metrics(self) -> dict[str, float]:
        """As `DataLoader.wait_metrics`."""
        return self._wait.metrics()

    def close(self) -> None:
        """Ends the thread, and lets go of the batches that were made ahead."""
        self._items.close()

    def __enter__(self) -> "PrefetchIterator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_size(size: int, *, caller: str, name: str) -> None:
    """Raises:
    BatchError: A negative size.
    """
    if size < 0:
        raise BatchError(
            f"{caller}: {name}={size} batches cannot be made ahead; 0 reads in the loop, 2 is usual."
        )


def _state_reader(source: object) -> Callable[[], Any] | None:
    return getattr(source, "state_dict", None) or getattr(source, "get_state", None)


def _placed(
    source: Iterator[PyTree], place: Callable[[PyTree], PyTree], read_state: Callable[[], Any] | None
) -> Generator[tuple[PyTree, Any], None, None]:
    for batch in source:
        yield place(batch), read_state() if read_state else None
