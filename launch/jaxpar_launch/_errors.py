"""The launcher's own errors: a launch that cannot be started as asked, an environment that makes no sense.

`jaxpar` imports the launcher, never the reverse, so these stand apart from `jaxpar.JaxparError`.
"""


class LaunchSpecError(ValueError):
    """A launch cannot be started as asked; the message names the flag and the line to write instead."""

    exit_code = 2


class WorkerEnvError(ValueError):
    """The environment variables of a worker are incomplete or malformed; the message names them."""


class LaunchFailedError(RuntimeError):
    """A launch ended with a non-zero exit code; the message is the root-cause report."""


class LaunchTimeoutError(LaunchFailedError):
    """A launch did not end in time and was killed; the message holds the last lines of every rank."""


class RendezvousError(RuntimeError):
    """The launchers of several hosts did not come together; the message says who is missing, and what to do."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
