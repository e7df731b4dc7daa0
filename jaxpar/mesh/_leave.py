"""Leaving a job: together and in bounded time, or at once and with a non-zero exit code.

    end of script    meet the others (deadline: who is missing?) --> JAX's own shutdown under a guard --> exit code
    exception        traceback --> reason into the store --> os._exit(1)
    rank missing     message naming it --> os._exit(1)

JAX's shutdown barrier alone waits 300 s in a process that has failed while its peers hang in a collective, and then
aborts it (SIGABRT, exit code lost).
"""

import atexit
import contextlib
import faulthandler
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import TracebackType

import jax

from jaxpar._errors import ProcessGroupError
from jaxpar.mesh._group import ProcessGroup, group_slot
from jaxpar.mesh._launched import launched
from jaxpar.mesh._meeting import meet
from jaxpar_launch.errors import install_excepthook

_LEAST_GUARD_S = 30.0
"""All processes have come to the end, so this only ends a hang: freeing a busy machine's memory may take seconds."""


def destroy_process_group(*, timeout_s: float | None = None) -> None:
    """Leaves the job together with all other processes (row C7). Does nothing in a program that has not joined.

    Optional: it runs by itself at the end of the script. Collectives need the group, so call it after the last one.

    Args:
        timeout_s: Deadline from now; default the `shutdown_timeout_s` of `init_process_group`.

    Raises:
        ProcessGroupError: Some ranks did not come in time; the message names them. At the end of the script the
            message is printed instead, and the process exits at once with code 1.

    Example:
        >>> import jaxpar.mesh
        >>> jaxpar.mesh.destroy_process_group()
    """
    group = group_slot().group
    if group is None:
        return
    if group.world_size > 1:
        timeout_s = group.shutdown_timeout_s if timeout_s is None else timeout_s
        _meet_to_leave(group, timeout_s)
        with _guard(timeout_s):
            jax.distributed.shutdown()
        group.close()
    group_slot().group = None


def leave_properly() -> None:
    """Makes this process leave as drawn above, whoever started it. Called once, when the group is formed."""
    atexit.register(_at_exit)
    if hasattr(sys, "ps1"):  # an interactive session survives its exceptions
        return
    sys.excepthook = functools.partial(_at_exception, sys.excepthook)
    install_excepthook()  # the launcher's, around ours: it keeps the last words for its report and exits


def _meet_to_leave(group: ProcessGroup, timeout_s: float) -> None:
    name = "destroy_process_group (the end of the script)"
    meet(group, name, True, judge=lambda _: True, timeout_s=timeout_s)


def _at_exit() -> None:
    group = group_slot().group
    if group is None or group.world_size == 1 or os.getpid() != group.pid:
        return
    try:
        # JAX's own exit handlers run after this one: they drain the devices and shut `jax.distributed` down.
        _meet_to_leave(group, group.shutdown_timeout_s)
    except ProcessGroupError as error:
        print(f"jaxpar: {error}", file=sys.stderr)
        _exit_now(1)
    _arm_guard(group.shutdown_timeout_s)


def _at_exception(
    show: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """An exception that nobody caught: show it and leave at once, so that the peers fail now and not in 300 s."""
    show(kind, error, trace)
    group = group_slot().group
    if group is None or group.world_size == 1 or os.getpid() != group.pid:
        return
    with contextlib.suppress(Exception):
        group.report_failure(f"{kind.__name__}: {error}")
    if issubclass(kind, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    elif launched() is None:
        _exit_now(1)


def _exit_now(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def _guard(timeout_s: float) -> Iterator[None]:
    _arm_guard(timeout_s)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _arm_guard(timeout_s: float) -> None:
    """Ends the process with code 1 and a traceback if it is still here after `timeout_s`, or 30 s if that is longer.

    A C thread, because Python starts no thread any more while it shuts down.
    """
    with contextlib.suppress(Exception):  # stderr may be closed or not a file
        faulthandler.dump_traceback_later(max(timeout_s, _LEAST_GUARD_S), exit=True)
