"""`CheckpointManager`: a folder of checkpoints that a run writes on a schedule and continues from.

step 100   model f32[D, F] P("dp")         -->   folder/100: f32[D, F]   -->   P(None, "tp"), a pipeline, one device
           optimizer, state of the data                                        of any number of processes
"""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxpar._errors import CheckpointError
from jaxpar.checkpoint._arrays import (
    restored,
    to_restore,
    to_save,
)
from jaxpar.checkpoint._contents import contents, read_contents
from jaxpar.checkpoint._due import Due
from jaxpar.checkpoint._files import faults, local
from jaxpar.checkpoint._groups import (
    Groups,
    check_fits,
    check_places,
    check_values,
    described,
    given_up,
    groups_of,
    in_batches,
    split_extra,
)
from jaxpar.checkpoint._store import Store
from jaxpar.mesh import all_gather_object, assert_same_everywhere, broadcast_object


@dataclass(frozen=True)
class Restored:
    """What a checkpoint gave back, beside the arrays that it put into the model.

    Args:
        step: of the checkpoint.
        data_state: as it was given to `save`.
        extra: the values that are not modules, as they were given to `save`.
        metrics: as they were given to `save`.
        left: names of arrays that the checkpoint did not have, with `strict=False`: they are as before.
    """

    step: int
    data_state: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    left: tuple[str, ...] = ()


class CheckpointManager:
    """Saves model, optimizer and the state of the data, and restores them into any layout.

    Each process writes the parts that its devices hold, replicas once; nothing moves between devices, but padded
    parameters of `fully_shard`, which are gathered for the time of the save. Names and shapes on disk are the model's own
    (`blocks.0.attention.qkv.kernel`), so a checkpoint of FSDP can be restored into TP, a pipeline, DDP or one device, by any number
    of processes. All processes call every method together, in one order.

    On SIGTERM `save` writes once more and `should_stop` becomes True, so that the loop can end; with several processes that
    needs `init_process_group(preemption=True)`, by which all of them stop at one step.

    A checkpoint is there completely or not at all: it is written beside and renamed. If the latest was damaged since,
    `restore` says so and takes the one before it.

    Args:
        folder: where checkpoints are; the same for all processes, on a disk that all see.
        every_steps: `save` writes after steps that this divides.
        every_minutes: and when so many minutes have passed since the last one (the clock of rank 0).
        keep: how many of the latest stay; None: all.
        keep_every: those of steps that this divides stay for ever.
        best: such as `("loss", "min")`: the best checkpoint by a metric that is given to `save` stays too.
        is_async: training goes on while a checkpoint is written: `save` returns when the arrays are copied to the host.
        checksums: note a checksum of every file, and compare it before restoring; sizes are compared in any case.
        memory_bytes: what `restore` reads at once in each process, on its way from the disk to the devices; an array that is larger is
            read alone. An asynchronous `save` holds this process's parts until they are written.
        timeout_s: how long processes wait for each other at the end of a save.

    Raises:
        CheckpointError: an option that has no meaning, or a folder that cannot be used.

    Source: `torch.distributed.checkpoint` (rows K1-K8), Orbax's CheckpointManager, which does the writing.

    Example:
        >>> import tempfile, optax
        >>> from flax import nnx
        >>> from jaxpar.checkpoint import CheckpointManager
        >>> model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> with CheckpointManager(tempfile.mkdtemp(), every_steps=10) as manager:
        ...     saved = [step for step in range(1, 31) if manager.save(step, model, optimizer, data_state={"offset": 8 * step})]
        ...     manager.restore(model, optimizer)
        Restored(step=30, data_state={'offset': 240}, extra={}, metrics={}, left=())
        >>> saved
        [10, 20, 30]
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_steps: int | None = 1,
        every_minutes: float | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: tuple[str, str] | None = None,
        is_async: bool = True,
        checksums: bool = True,
        memory_bytes: int = 4 << 30,
        timeout_s: float = 600.0,
    ) -> None:
        _check_options(
            every_steps=every_steps,
            every_minutes=every_minutes,
            keep=keep,
            keep_every=keep_every,
            memory_bytes=memory_bytes,
            timeout_s=timeout_s,
        )
        if best is not None and best[1] not in ("min", "max"):
            raise CheckpointError(
                f"CheckpointManager: best={best!r} names a metric and whether the least or the greatest is best. Write "
                f"best=({best[0]!r}, 'min') or best=({best[0]!r}, 'max')."
            )
        self._checksums, self._memory_bytes = checksums, memory_bytes
        self._due = Due(every_steps=every_steps, every_minutes=every_minutes)
        self._store = Store(
            local(folder),
            keep=keep,
            keep_every=keep_every,
            best=best,
            is_async=is_async,
            with_checksums=checksums,
            timeout_s=timeout_s,
        )

    @property
    def should_stop(self) -> bool:
        """Whether the job was told to end (SIGTERM) and has been saved: leave the loop now."""
        return self._due.is_ending

    def steps(self) -> list[int]:
        """The steps whose checkpoints are complete, in order; the same list on all processes."""
        return broadcast_object(self._store.steps)

    def save(
        self,
        step: int,
        model: nnx.Module,
        optimizer: nnx.Optimizer | None = None,
        *,
        data_state: Any = None,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> bool:
        """Writes a checkpoint if it is time for one: call it after every step.

        It is time after `every_steps` and `every_minutes`, and when the job is told to end (SIGTERM to any process): then the
        checkpoint is complete when this returns, and `should_stop` is True.

        Args:
            step: how many steps were done.
            model: in any layout, also before its first step.
            optimizer: with its state.
            data_state: where the data stands, such as `sampler.state_dict()`: what JSON can hold, the same on all processes.
            extra: other modules (such as a moving average of the parameters) and values that JSON can hold, by name.
            metrics: numbers, for `best` and to look at.
            force: write in any case.

        Returns:
            Whether a checkpoint is being written.

        Raises:
            CheckpointError: it cannot be written, or the one before, which was written in the background, was not; or a variable
                holds a shape without values, or what JSON cannot hold.
            DesyncError: the processes save different things.
        """
        is_due = self._due(step)
        if not (is_due or force) or step in self.steps():
            return False
        modules, values = split_extra(extra)
        groups = groups_of(model, optimizer, modules)
        check_values(groups)
        about = contents(
            step,
            described(groups),
            data_state=data_state,
            extra=values,
            metrics=metrics or {},
            num_processes=jax.process_count(),
            num_devices=jax.device_count(),
        )
        facts = {
            "step": str(step),
            "arrays": hashlib.sha256(str(about["arrays"]).encode()).hexdigest(),
            "data_state": str(data_state),
            "extra": str(values),
        }
        assert_same_everywhere("saving a checkpoint", facts)
        self._store.save(
            step, {name: to_save(found) for name, found in groups.items()}, about, about["metrics"]
        )
        self._due.saved()
        if self.should_stop:
            self._store.wait()
        return True

    def restore(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer | None = None,
        *,
        extra: Mapping[str, nnx.Pytree] | None = None,
        step: int | None = None,
        strict: bool = True,
    ) -> Restored | None:
        """Puts the latest checkpoint into the model, in place, in the layout that it has now.

        Each process reads the parts that its devices hold. Variables may be abstract (`jax.ShapeDtypeStruct` with a sharding):
        they become arrays, so nothing has to be initialised first. The arrays that the model had are given up before the new
        ones are read: there is no second copy on the devices.

        Args:
            model: as it shall be trained: parallelised first, restored then. Before or after the `TrainStep` is built.
            optimizer: built for that model; None: its state is not read.
            extra: the modules that were given to `save` as `extra`, by name.
            step: which checkpoint; None: the latest one that is not damaged.
            strict: False leaves arrays that the checkpoint does not have as they are, and ignores those that only it has.

        Returns:
            The step, and what was saved beside the arrays; None if the folder has no checkpoint and `step` is None.

        Raises:
            CheckpointError: there is no such step, all checkpoints are damaged, or names, shapes or dtypes do not fit: all of them in one
                message, and nothing is changed.
        """
        self._store.wait()
        groups = groups_of(model, optimizer, extra or {})
        check_places(groups)
        found = self._find(step)
        if found is None:
            return None
        about = read_contents(self._store.path(found))
        check_fits(self._store.path(found), about, groups, strict=strict)
        saved = {name: about["arrays"].get(name, {}) for name in groups}
        left = tuple(a.name for name, arrays in groups.items() for a in arrays if a.name not in saved[name])
        # From here on nothing refers to the old arrays.
        groups = {
            name: [given_up(a) for a in arrays if a.name in saved[name]] for name, arrays in groups.items()
        }
        self._read(found, groups)
        return Restored(found, about["data_state"], about["extra"], about["metrics"], left)

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is complete; raises CheckpointError if that fails."""
        self._store.wait()

    def close(self) -> None:
        """Waits for the last checkpoint, and gives SIGTERM its meaning back."""
        self._due.close()
        self._store.close()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:  # others may be gone: nothing is waited for
            self._due.close()

    def _find(self, step: int | None) -> int | None:
        """The step to restore: as asked, or the latest whose files are as they were written."""
        steps = self.steps()
        if step is not None and step not in steps:
            raise CheckpointError(
                f"{self._store.folder} has no checkpoint of step {step}; it has those of {steps}."
            )
        found: dict[int, list[str]] = {}
        for candidate in [step] if step is not None else reversed(steps):
            found[candidate] = self._faults(candidate)
            if not found[candidate]:
                _warn_of(self._store.folder, found)
                return candidate
        if found:
            raise CheckpointError(
                f"{self._store.folder}: no checkpoint can be read: {_fault_text(found)} Restore the files from a copy, or train "
                f"from the beginning in another folder."
            )
        return None

    def _faults(self, step: int) -> list[str]:
        """What is wrong with a checkpoint's files; the processes share the reading."""
        rank, num_ranks = jax.process_index(), jax.process_count()
        path = self._store.path(step)
        shares = all_gather_object(
            lambda: faults(path, part=rank, num_parts=num_ranks, with_checksums=self._checksums)
        )
        return sorted({fault for share in shares for fault in share})

    def _read(self, step: int, groups: Groups) -> None:
        for batch in in_batches(groups, self._memory_bytes):
            self._read_batch(step, batch)

    def _read_batch(self, step: int, groups: Groups) -> None:
        wanted = {
            name: {array.name: to_restore(array) for array in arrays} for name, arrays in groups.items()
        }
        try:
            values = self._store.restore(step, wanted)
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self._store.folder} could not be read ({type(error).__name__}: {error}). The model's "
                f"arrays were given up for it: restore another step, or build the model anew."
            ) from error
        for name, arrays in groups.items():
            found = values.get(name, {})
            for array, value in zip(arrays, restored(arrays, [found[a.name] for a in arrays]), strict=True):
                array.assign(value)


def _warn_of(folder: Path, found: Mapping[int, list[str]]) -> None:
    broken = {step: lines for step, lines in found.items() if lines}
    if broken:
        warnings.warn(
            f"{folder}: {_fault_text(broken)} The checkpoint of step {max(set(found) - set(broken))} is used.",
            stacklevel=4,
        )


def _fault_text(found: Mapping[int, list[str]]) -> str:
    return " ".join(f"Step {step} is damaged: {'; '.join(lines)}." for step, lines in found.items())


def _check_options(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and value <= 0:
            raise CheckpointError(
                f"CheckpointManager: {name}={value} must be positive. Leave it out for its default."
            )
