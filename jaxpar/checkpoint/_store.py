"""A folder of checkpoints, written and read with Orbax; what is in them is `_arrays` and `_contents`.

    folder/400/model       arrays of the model              Orbax, OCDBT: each process writes its own parts
    folder/400/optimizer   arrays of the optimizer
    folder/400/extra       arrays of other modules
    folder/400/contents    names, shapes, step, state of the data: JSON
    folder/400/files.json  sizes and checksums

A checkpoint is written as `400.orbax-checkpoint-tmp` and renamed when all processes are done: it is there or it is not.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from jaxpar._errors import CheckpointError
from jaxpar.checkpoint._files import complete_steps, write_list
from jaxpar.checkpoint._stages import stage_registry

GROUPS = ("model", "optimizer", "extra")


class Store:
    """Orbax's CheckpointManager with our items, policies and errors.

    Args:
        folder: of the checkpoints; made if it is not there.
        keep: how many of the latest stay; None: all.
        keep_every: those of steps that this divides stay for ever.
        best: name of a metric and "min" or "max": the best of them stays too.
        is_async: write in the background.
        with_checksums: note a checksum for each file.
        timeout_s: how long processes wait for each other.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        best: tuple[str, str] | None = None,
        is_async: bool = False,
        with_checksums: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        self.folder, self._with_checksums, self._is_async = folder, with_checksums, is_async
        registry = stage_registry()
        # Not compressed: weights give a tenth, and take half of the time.
        handlers: dict[str, Any] = {
            name: ocp.PyTreeCheckpointHandler(
                type_handler_registry=registry,
                use_compression=False,
            )
            for name in GROUPS
        }
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_policy(keep, keep_every, best),
            enable_async_checkpointing=True,  # also if each save is waited for: its commit can be prepared
            async_options=ocp.AsyncOptions(
                timeout_secs=round(timeout_s), post_finalization_callback=self._before_commit
            ),
            cleanup_tmp_directories=True,
            save_root_metadata=False,
        )
        handlers["contents"] = ocp.JsonCheckpointHandler()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)
        except OSError as error:
            raise CheckpointError(f"the folder {folder} cannot be used for checkpoints: {error}.") from error
        self._saving: int | None = None

    def steps(self) -> list[int]:
        """Steps that are complete, in order."""
        return complete_steps(self.folder)

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.folder.absolute() / str(step)

    def save(
        self,
        step: int,
        arrays: Mapping[str, Mapping[str, Any]],
        about: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> None:
        """Begins to write; returns when the arrays may change.

        Raises:
            CheckpointError: this save or the one before it failed.
        """
        items: dict[str, Any] = {
            name: ocp.args.PyTreeSave(dict(found)) for name, found in arrays.items() if found
        }
        items["contents"] = ocp.args.JsonSave(dict(about))
        self.wait()
        self._saving = step
        try:
            self._manager.save(
                step, args=ocp.args.Composite(**items), metrics=dict(metrics) or None, force=True
            )
        except Exception as error:
            raise self._failure(error) from error
        if not self._is_async:
            self.wait()

    def wait(self) -> None:
        """Waits until the last save is complete.

        Raises:
            CheckpointError: it failed.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error
        self._saving = None

    def restore(self, step: int, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Reads arrays as they are wanted, by group and name."""
        items = {
            name: ocp.args.PyTreeRestore(
                item=dict.fromkeys(args, 0), restore_args=dict(args), partial_restore=True
            )
            for name, args in wanted.items()
            if args
        }
        if not items:
            return {}
        found = self._manager.restore(step, args=ocp.args.Composite(**items))
        return {name: found[name] for name in items}

    def close(self) -> None:
        """Waits for the last save and for deletions."""
        self.wait()
        self._manager.close()

    def _before_commit(self) -> None:
        """All processes have written; Orbax renames the folder after this."""
        if jax.process_index() == 0:
            for folder in self.folder.absolute().glob(f"{self._saving}.orbax-checkpoint-tmp*"):
                write_list(folder, with_checksums=self._with_checksums)

    def _failure(self, error: Exception) -> CheckpointError:
        step, self._saving = self._saving, None
        complete = self.steps()
        last = (
            f"the last complete one is that of step {complete[-1]}"
            if complete
            else "there is no complete one"
        )
        return CheckpointError(
            f"the checkpoint of step {step} in {self.folder} was not written ({type(error).__name__}: {error}); {last}."
        )


def _policy(keep: int | None, keep_every: int | None, best: tuple[str, str] | None) -> Any:
    found: list[Any] = [policies.LatestN(keep)]
    if keep_every is not None:
        found.append(policies.EveryNSteps(keep_every))
    if best is not None:
        name, mode = best
        found.append(
            policies.BestN(
                get_metric_fn=lambda metrics: _quality(metrics.get(name), mode),
                reverse=mode == "min",
                n=1,
                keep_checkpoints_without_metrics=False,
            )
        )
    return policies.AnyPreservationPolicy(found)


def _quality(value: float | None, mode: str) -> float:
    """A metric to sort by: one that is missing or not a number is the worst."""
    worst = math.inf if mode == "min" else -math.inf
    return worst if value is None or math.isnan(value) else value
