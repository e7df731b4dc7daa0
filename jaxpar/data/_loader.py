"""A data set as global batches on the mesh: dealt, read ahead, masked, and resumable on another mesh.

shared order ----> plan ----> source ----> global_batch ----> loop
(epoch, offset)    rows of    host         device arrays      the state moves here, when a batch is handed out
                   this       arrays
                   process   `---------- a thread, ahead ----------'
"""

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import jax

from jaxpar._pytree import PyTree
from jaxpar.data._background import Background
from jaxpar.data._global_batch import fed_positions, global_batch
from jaxpar.data._input_wait import InputWait
from jaxpar.data._order import DataState, SharedOrder
from jaxpar.data._plan import BatchPlan, BatchRows, plan_batches
from jaxpar.data._prefetch import check_size
from jaxpar.data._source import as_source
from jaxpar.mesh import MeshLike, as_jax_mesh, assert_same_everywhere, axis_size


class DataLoader:
    """Iterates over one epoch in global batches `(batch, mask)` on the mesh, and remembers where it is (rows A1 to A4).

    PyTorch: `DataLoader` with a `DistributedSampler`. Each process reads the rows that its devices hold. The batches
    are the same samples in the same order under every number of processes and devices, so losses are too: rows that
    fill up the last batch, or a batch that does not divide over the devices, are masked.

        for epoch in range(loader.epoch, num_epochs):
            for tokens, mask in loader:
                step({"tokens": tokens, "mask": mask})           loss: Mean((losses * mask).sum(), mask.sum())
                save(..., data_state=loader.state_dict())        with this batch counted, and none that is read ahead

    A pass begins where the loader is: after a `break` or `load_state_dict` that is inside an epoch. At the end of an
    epoch it goes to the next by itself. Before a pass the processes of the mesh compare where they are. For so many
    steps write `zip(range(steps), loader)`: the other way round, zip takes a batch that nobody sees.

    Args:
        dataset: An array, a dict, tuple or list of arrays [N, ...]; or a data set with `len()` and `dataset[i]`, whose
            samples are read one by one and stacked; or a `grain.MapDataset`, read by many threads or processes
            (`GrainSource`; `grain.MapDataset.source(dataset)` makes one of any data set).
        global_batch_size: Samples of one step over all processes. It stays when their number changes.
        mesh: The mesh of the step.
        batch_axes: Axes over which the samples are split.
        shuffle: A new order each epoch, from `seed` and the epoch.
        seed: The same on all processes.
        drop_last: Leave out a last batch that is not full.
        rows_multiple_of: Fill up so that each device's rows divide by this: the number of microbatches.
        num_ahead: Batches made ahead in a thread; 0 reads in the loop.
        to_devices: False yields this process's rows as host arrays, for a pipeline over several processes.

    Raises:
        BatchError: The data set has no length, or a size is no count.
        MeshError: An axis is not in the mesh.
        DesyncError: (on a pass) Processes disagree on the data, its order, the epoch or the offset.

    Example:
        >>> import jaxpar, numpy as np
        >>> mesh = jaxpar.init_device_mesh((8,), ("dp",))
        >>> loader = jaxpar.data.DataLoader({"x": np.arange(20)}, 16, mesh=mesh, batch_axes="dp", shuffle=False)
        >>> for batch, mask in loader:
        ...     print(batch["x"].shape, int(mask.sum()), loader.state_dict()["offset"])
        (16,) 16 16
        (16,) 4 20
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        *,
        mesh: MeshLike,
        batch_axes: str | tuple[str, ...],
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rows_multiple_of: int = 1,
        num_ahead: int = 2,
        to_devices: bool = True,
    ) -> None:
        check_size(num_ahead, caller="DataLoader", name="num_ahead")
        self._source = as_source(dataset)
        self._order = SharedOrder(len(self._source), shuffle=shuffle, seed=seed)
        self._global_batch_size = global_batch_size
        self._mesh = mesh
        self._batch_axes = batch_axes
        self._positions = fed_positions(mesh, batch_axes)
        self._drop_last = drop_last
        self._rows_multiple_of = rows_multiple_of
        self._num_ahead = num_ahead
        self._to_devices = to_devices
        self._wait = InputWait()
        self._pass: Background[tuple[PyTree, PyTree, DataState]] | None = None
        self._plan()  # tells wrong sizes here and not in the first pass

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of."""
        return self._order.epoch

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        full, rest = divmod(self._order.length, self._global_batch_size)
        return full if self._drop_last or not rest else full + 1

    def __iter__(self) -> Iterator[tuple[PyTree, PyTree]]:
        """From where the loader is to the end of the epoch."""
        self._agree()
        items = self._pass = Background(self._make(self._plan()), size=self._num_ahead, wait=self._wait)
        try:
            for batch, mask, state in items:
                if self._pass is not items:
                    return
                self._order.offset = state["offset"]
                yield batch, mask
        finally:
            items.close()
        if self._pass is items:
            self._order.set_epoch(self._order.epoch + 1)

    def state_dict(self) -> DataState:
        """Where to go on after the batch that was handed out last, whatever was read ahead since.

        JSON, the same on all processes: the epoch, the samples of the shared order that all processes together have
        used, and what the order is made of.
        """
        return self._order.state(self._order.offset)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass goes on there, on any number of processes and with any `global_batch_size`.

        A pass that is under way ends. A state of `DistributedSampler` serves too.

        Raises:
            BatchError: It is the state of another data set, seed or shuffle, or none at all.
        """
        self._order.load(state, caller="DataLoader.load_state_dict")
        self._pass = None

    def wait_metrics(self) -> dict[str, float]:
        """How long the loop has waited for input since the last call: for a step's metrics, or those of many.

        Returns:
            `input_wait_s`, the mean wait for a batch; and `input_wait_share`, the share of all time that was waiting.
            Measured on the host: while steps are in flight on the devices, a wait may cost nothing.
        """
        return self._wait.metrics()

    def _agree(self) -> None:
        """All processes go on at the same point of the same order; a mesh of some processes only is not compared."""
        processes = {device.process_index for device in as_jax_mesh(self._mesh).devices.flat}
        if 1 < len(processes) == jax.process_count():
            facts = {"state": str(self.state_dict()), "global_batch_size": str(self._global_batch_size)}
            assert_same_everywhere("a pass of DataLoader", facts | {"drop_last": str(self._drop_last)})

    def _plan(self) -> BatchPlan:
        return plan_batches(
            self._order,
            self._global_batch_size,
            positions=self._positions,
            num_positions=axis_size(self._mesh, self._batch_axes),
            multiple_of=self._rows_multiple_of,
            drop_last=self._drop_last,
            caller="DataLoader",
        )

    def _make(self, plan: BatchPlan) -> Generator[tuple[PyTree, PyTree, DataState], None, None]:
        """In the thread: reads a batch, fills up, places it."""
        host_batches = self._source.batches(plan)
        try:
            for rows in plan:
                batch = _read(host_batches, rows)
                yield *self._place((batch, rows.mask)), rows.state
        finally:
            host_batches.close()

    def _place(self, batch: PyTree) -> PyTree:
        return global_batch(batch, self._mesh, self._batch_axes) if self._to_devices else batch


def _read(host_batches: Iterator[PyTree], rows: BatchRows) -> PyTree:
    try:
        return next(host_batches)
    except Exception as error:
        shown = ", ".join(map(str, rows.indices[:8])) + (", ..." if len(rows.indices) > 8 else "")
        error.add_note(
            f"jaxpar.data.DataLoader: while reading samples {shown} of epoch {rows.state['epoch']}"
        )
        raise
