"""Every error that jaxpar raises for a user's mistake, so that one `except JaxparError` catches them all.

Picture: `JaxparError` is the root; mistakes in arguments are also `ValueError`s, failures of a running job
are also `RuntimeError`s. A message says what failed, where (parameter path, axis, rank), the numbers, why the
rule exists, and the line to write instead.
"""


class JaxparError(Exception):
    """Root of all errors that jaxpar raises on purpose."""


class MeshError(JaxparError, ValueError):
    """A mesh cannot be built or sliced as asked."""


class PlacementError(JaxparError, ValueError):
    """An array cannot be placed as asked: unknown dim, uneven split, placement count that is not the mesh's."""


class CollectiveError(JaxparError, ValueError):
    """A collective was called with an axis, root, op or shape that it cannot serve."""


class ParallelizeError(JaxparError, ValueError):
    """A model cannot be parallelised as asked: nothing to train, unknown path, wrong mesh axis."""


class ScheduleError(JaxparError, ValueError):
    """A pipeline schedule breaks a law, cannot be read, or is not defined for the numbers asked.

    `law` names the law: grammar, ownership, completeness, order, matching, progress, memory or definition.
    """

    def __init__(self, message: str, *, law: str = "") -> None:
        super().__init__(message)
        self.law = law


class BatchError(JaxparError, ValueError):
    """A batch does not fit the mesh, the accumulation count or the loss."""


class CommunicationCheckError(JaxparError, AssertionError):
    """The compiled program does not communicate as asserted (`jaxpar.debug.assert_collectives`)."""


class ProcessGroupError(JaxparError, RuntimeError):
    """The processes of a job could not meet, or one of them is missing; the message names the ranks."""


class DesyncError(ProcessGroupError):
    """The processes of a job disagree on mesh, program or configuration; the message names who and what."""


class CheckpointError(JaxparError, ValueError):
    """A checkpoint cannot be written, read, or does not fit the model; the message lists all that does not fit."""


class WorkerLostError(ProcessGroupError):
    """A worker of this job was lost and is being replaced; `jaxpar.mesh.run_recoverable` takes it from here."""


class RecoveryError(JaxparError, ValueError):
    """State cannot be kept for a recovery, or does not fit what was kept."""
