"""Last words of a worker: what torchelastic's `@record` does, for programs the launcher does not run itself.

    jaxpar-launch train.py                  nothing to do: the launcher runs the script so that failures are kept
    jaxpar-launch --no-python bash run.sh   the Python program inside calls install_excepthook(), or uses @record

A failure is written to JAXPAR_ERROR_FILE as `{"message": {"message", "extraInfo": {"py_callstack",
"timestamp", "file", "line", "function"}}}`, and the process leaves by `os._exit(1)`: an uncaught exception
would otherwise wait up to 300 s in JAX's shutdown barrier while the other ranks hang in a collective.
"""

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from jaxpar_launch._run import leave_at_once, write_error_file
from jaxpar_launch.env import WorkerEnv

_P = ParamSpec("_P")
_R = TypeVar("_R")


def record(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a program's main function: an exception that leaves it is recorded, and ends the process.

    Outside a launcher the function behaves as undecorated (torchelastic's `record`, row E6).

    Example:
        >>> @record
        ... def main() -> int:
        ...     return 42
        >>> main()
        42
    """

    @functools.wraps(function)
    def recorded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            worker = WorkerEnv.from_environ()
            if worker is None:
                raise
            sys.excepthook(type(error), error, error.__traceback__)
            _record_and_leave(worker, error)
            raise  # not reached

    return recorded


def install_excepthook() -> None:
    """Records every uncaught exception of this process from now on, and ends it; no effect outside a launcher.

    The hook that was installed before still prints the traceback.
    """
    worker = WorkerEnv.from_environ()
    if worker is None:
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if not isinstance(error, KeyboardInterrupt):
            _record_and_leave(worker, error)

    sys.excepthook = hook


def _record_and_leave(worker: WorkerEnv, error: BaseException) -> None:
    write_error_file(worker.error_file, error)
    leave_at_once(1)
