"""Grain reads, jaxpar deals: a `grain.MapDataset` under the guarantees of `DataLoader`.

grain.MapDataset        maps, augmentations, seeds; one sample by index        Grain's threads or processes
BatchPlan               which samples, for whom, in which batch                jaxpar
"""

from collections.abc import Generator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxpar._errors import BatchError
from jaxpar._pytree import PyTree
from jaxpar.data._plan import BatchPlan

if TYPE_CHECKING:
    import grain


class GrainSource:
    """Samples of a `grain.MapDataset`, read ahead by Grain; a `DataLoader` takes it in place of a data set.

    The data set is neither sharded nor batched nor repeated: `DataLoader` shuffles by its own seed, deals rows to
    processes in mesh order, and masks the last batch. Sample i of epoch e is asked for as `dataset[e * len(dataset) + i]`,
    so what Grain draws (`random_map`, `shuffle`) differs by epoch, and is the same under every number of processes
    and after every restart.

    Args:
        dataset: Without `filter`, after which nobody could say how many samples there are.
        num_threads: Samples that are read at a time, in this process; 0 reads in the loader's own thread.
        num_workers: Processes that prepare whole batches in turn, in place of threads: for maps that spend their time
            in Python. They are spawned: the data set is pickled, and the script needs `if __name__ == "__main__"`.

    Raises:
        BatchError: Grain is not installed or not ready for workers, the data set is no `MapDataset`, a number is
            negative, or (reading) a sample is filtered out.

    Example:
        >>> import grain
        >>> from jaxpar.data import DataLoader, GrainSource
        >>> from jaxpar.mesh import init_device_mesh
        >>> squares = grain.MapDataset.range(8).map(lambda i: i * i)
        >>> loader = DataLoader(
        ...     GrainSource(squares, num_threads=2), 8, mesh=init_device_mesh((8,), ("dp",)), batch_axes="dp", shuffle=False
        ... )
        >>> [batch.tolist() for batch, mask in loader]
        [[0, 1, 4, 9, 16, 25, 36, 49]]
    """

    def __init__(
        self, dataset: "grain.MapDataset[Any]", *, num_threads: int = 16, num_workers: int = 0
    ) -> None:
        grain = _import_grain()
        if not isinstance(dataset, grain.MapDataset):
            raise BatchError(
                f"GrainSource: a {type(dataset).__name__} is no grain.MapDataset: its samples have no numbers, so they"
                " cannot be dealt to processes. Give the MapDataset before to_iter_dataset(), or shard and batch by"
                " Grain itself and write prefetch_to_device(iter(dataset), mesh, batch_axes)."
            )
        _check_readers(num_threads, num_workers)
        self._dataset = dataset
        self._num_threads = num_threads
        self._num_workers = num_workers

    def __len__(self) -> int:
        return len(self._dataset)

    def batches(self, plan: BatchPlan) -> Generator[PyTree, None, None]:
        """One host batch for each of the plan's."""
        grain = _import_grain()
        samples = grain.MapDataset.source(_PlannedSamples(self._dataset, plan))
        if self._num_workers:
            # Workers take elements in turn, so an element has to be a batch.
            options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
            whole = samples.batch(plan.rows.size).to_iter_dataset(options)
            batches = whole.mp_prefetch(grain.MultiprocessingOptions(num_workers=self._num_workers))
        else:
            ahead = max(self._num_threads, plan.rows.size) if self._num_threads else 0
            options = grain.ReadOptions(num_threads=self._num_threads, prefetch_buffer_size=ahead)
            batches = samples.to_iter_dataset(options).batch(plan.rows.size)
        iterator = iter(batches)
        try:
            yield from iterator
        finally:
            iterator.close()


class _PlannedSamples:
    """The samples of all batches of a plan, one after another: what Grain calls a random access data source."""

    def __init__(self, dataset: "grain.MapDataset[Any]", plan: BatchPlan) -> None:
        self._dataset = dataset
        self._plan = plan

    def __len__(self) -> int:
        return len(self._plan) * self._plan.rows.size

    def __getitem__(self, position: int) -> PyTree:
        batch, row = divmod(int(position), self._plan.rows.size)
        index = int(self._plan[batch].indices[row])
        epoch = self._plan.begin["epoch"]
        sample = self._dataset[epoch * len(self._dataset) + index]
        if sample is None:
            raise BatchError(
                f"GrainSource: sample {index} of epoch {epoch} is filtered out, so the batches of a pass cannot be"
                " counted ahead. Leave out filter(), and give such samples the weight 0; or select the samples once,"
                " grain.MapDataset.source([i for i in range(len(dataset)) if keep(i)])."
            )
        return sample


def _check_readers(num_threads: int, num_workers: int) -> None:
    if num_threads < 0 or num_workers < 0:
        raise BatchError(
            f"GrainSource: num_threads={num_threads}, num_workers={num_workers}, but both are counts; num_threads=0 reads"
            " in the loader's own thread, num_workers=0 in this process."
        )
    if num_workers:
        from absl import flags  # Grain brings it

        if not flags.FLAGS.is_parsed():
            raise BatchError(
                f"GrainSource: num_workers={num_workers}, but Grain's processes are told flags of absl, and this"
                " program has not parsed any. Write absl.flags.FLAGS.mark_as_parsed() first, or start by absl.app.run."
            )


def _import_grain() -> ModuleType:
    try:
        import grain
    except ImportError as error:
        raise BatchError(
            "GrainSource: Grain is not installed. Write pip install 'jaxpar[examples]', or pip install grain; or read"
            " without it: DataLoader takes arrays, and any data set with len() and dataset[i]."
        ) from error
    return grain
