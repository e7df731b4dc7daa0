"""Where a run of `train_lm.py` stands, on disk: saved on a schedule and on SIGTERM, and continued from.

--checkpoint-dir D                 a checkpoint every --checkpoint-every steps, the last --keep of them
the same command once more         goes on after the latest, on the processes and devices that there are now
"""

import argparse
from types import TracebackType
from typing import Any

from flax import nnx

from jaxpar.checkpoint import CheckpointManager

# What may not change between the parts of a run if its losses are to be those of one run; the mesh may.
OF_THE_RUN = ("seed", "batch", "seq", "steps", "lr", "warmup", "clip_norm", "max_bytes")


class Saves:
    """The checkpoints of a run; without --checkpoint-dir there are none, and the run begins at step 0."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._flags = {name: getattr(args, name) for name in OF_THE_RUN}
        self._resume = args.resume
        self._last = args.steps
        self._manager = None
        if args.checkpoint_dir:
            self._manager = CheckpointManager(
                args.checkpoint_dir,
                every_steps=args.checkpoint_every,
                every_minutes=args.checkpoint_minutes,
                keep=args.keep,
            )

    @property
    def should_stop(self) -> bool:
        """Whether the job was told to end, and has been saved."""
        return self._manager is not None and self._manager.should_stop

    def restore(self, model: nnx.Module, optimizer: nnx.Optimizer) -> tuple[int, str]:
        """Puts the checkpoint that --resume names into the model; how many steps were done, and a line to print.

        Raises:
            ValueError: --resume never, and the folder has checkpoints; or the checkpoint cannot be used.
        """
        if self._manager is None:
            return 0, ""
        if self._resume == "never":
            if self._manager.steps():
                raise ValueError(
                    f"--resume never, but --checkpoint-dir has checkpoints of steps {self._manager.steps()}. Write --resume auto "
                    f"to go on after the last one, or name another folder."
                )
            return 0, ""
        step = None if self._resume == "auto" else int(self._resume)
        found = self._manager.restore(model, optimizer, step=step)
        if found is None:
            return 0, ""
        changed = [
            f"--{name.replace('_', '-')} {found.extra.get(name)} then, {value} now"
            for name, value in self._flags.items()
            if found.extra.get(name) != value
        ]
        note = f"; other flags than before: {', '.join(changed)}" if changed else ""
        return found.step, f"continued after step {found.step} of {self._last}{note}"

    def save(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
        """After every step: writes if it is time, in the background; the last step always."""
        if self._manager is not None:
            self._manager.save(
                step,
                model,
                optimizer,
                data_state={"step": step},  # the batch of a step follows from its number and --seed
                extra=self._flags,
                force=step == self._last,
            )

    def __enter__(self) -> "Saves":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._manager is not None:
            self._manager.__exit__(kind, error, trace)


def about_end(step: int, args: argparse.Namespace) -> str:
    """What is said when the job was told to end."""
    return f"told to end: saved after step {step} of {args.steps} in {args.checkpoint_dir}; the same command goes on from there"


def folder(args: argparse.Namespace) -> Any:
    """Where outputs go if nothing else is said: to the checkpoints, so that a run continues its files."""
    return args.out or args.checkpoint_dir
