"""Runs a worker's Python script as if it were run directly, and keeps its last words if it fails.

    python _run.py ERROR_FILE script train.py --lr 3     like  python train.py --lr 3
    python _run.py ERROR_FILE module pkg.train --lr 3    like  python -m pkg.train --lr 3

                 returns / sys.exit(0)     ->  normal exit: atexit handlers run, JAX waits for the other ranks
    the script   raises                    ->  traceback, ERROR_FILE, open files flushed, os._exit(1)
                 sys.exit(3)               ->  ERROR_FILE, open files flushed, os._exit(3)
                 crashes (SIGSEGV, abort)  ->  Python's stack is printed (faulthandler), the signal kills it
                 hangs                     ->  when asked, it writes all threads' stacks beside ERROR_FILE

Surprise: a failed worker leaves by `os._exit`, without atexit handlers and without waiting for its threads.
Otherwise JAX's handler would wait up to 300 s for the other ranks, which wait for this one in a collective.

This file must stand alone: it is run by its path, before the launcher's package is importable.
"""

import faulthandler
import os
import signal
import sys
from types import ModuleType, TracebackType

TYPE_CHECKING = False  # every worker pays for imports here, so typing stays out at run time
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn, TextIO

_ZIP_SUFFIXES = (".zip", ".pyz")
STACKS_FILE = "stacks.txt"
VALUE_FILE = "value.pickle"  # what a function returned: see `_called.py`
STACKS_SIGNAL = signal.SIGURG  # ignored by whoever does not listen for it


def main() -> None:
    """Entry point: see the module docstring for the arguments."""
    error_file, kind, name = sys.argv[1:4]
    sys.argv[:] = sys.argv[3:]
    script_path = os.path.abspath(name)
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if kind == "module" else _script_folder(script_path)
    _prepare_streams()
    stacks = _write_stacks_when_asked(error_file)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        _execute(kind, name, script_path, module)
    except BaseException as error:
        _leave(error, error_file)
    del stacks


def _execute(kind: str, name: str, path: str, module: ModuleType) -> None:
    """What the interpreter does for `python -m name` or `python path`, in a fresh `__main__`."""
    if kind == "module" or os.path.isdir(path) or path.endswith(_ZIP_SUFFIXES):
        import runpy

        # The function behind `python -m`; unlike runpy's public ones it keeps `__main__` to the very end.
        run = runpy._run_module_as_main  # pyright: ignore[reportAttributeAccessIssue]
        run(name) if kind == "module" else run("__main__", False)
        return
    loader = type(__loader__)("__main__", path)  # this file's loader is the one for source files
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __loader__=loader, __cached__=None)
    with open(path, "rb") as source:
        code = compile(source.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _script_folder(path: str) -> str:
    if os.path.isdir(path) or path.endswith(_ZIP_SUFFIXES):
        return path
    return os.path.dirname(os.path.realpath(path))


def _prepare_streams() -> None:
    """Whole lines leave at once, so that nothing is lost in a crash; crashes print Python's stack."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.isatty():
            stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    if sys.stderr is not None:
        faulthandler.enable()


def _write_stacks_when_asked(error_file: str) -> "TextIO | None":
    """The launcher asks where a rank hangs; the answer needs no Python to run, so a rank stuck in C answers too."""
    try:
        file = open(os.path.join(os.path.dirname(error_file), STACKS_FILE), "w")
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    except (OSError, AttributeError):  # no such folder; no such function on this system
        return None
    return file


def _leave(error: BaseException, error_file: str) -> None:
    """Ends the process as an uncaught `error` would, but at once and with its last words kept."""
    trace = _without_own_frames(error.__traceback__)
    error.__traceback__ = trace
    if isinstance(error, SystemExit):
        code = _exit_code(error)
        if code == 0:
            raise error
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        write_error_file(error_file, error)
        leave_at_once(code)
    sys.excepthook(type(error), error, trace)
    if isinstance(error, KeyboardInterrupt):
        flush_open_files()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    write_error_file(error_file, error)
    leave_at_once(1)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    own = (__file__, os.path.join(os.path.dirname(__file__), "_called.py"))
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


# ---------------------------------------------------------------------------------------------------------------------
# Last words: also behind `jaxpar_launch.errors`
# ---------------------------------------------------------------------------------------------------------------------


def write_error_file(path: str | None, error: BaseException) -> None:
    """Writes torchelastic's error JSON (row E6) with the script's file and line beside; never raises."""
    if not path:
        return
    import json
    import time
    import traceback

    extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(time.time())}
    extra |= _users_place(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        extra |= {"file": error.filename, "line": error.lineno}
    text = traceback.format_exception_only(error)[-1].strip()
    message = {"message": text, "extraInfo": extra}
    try:
        with open(f"{path}.{os.getpid()}", "w") as file:
            json.dump({"message": message}, file)
        os.replace(file.name, path)  # a reader never sees half of it
    except OSError as cannot_write:
        print(f"jaxpar-launch: no error file {path}: {cannot_write}", file=sys.stderr)


def _users_place(trace: TracebackType | None) -> dict[str, str | int]:
    """Where in the user's own code the error passed last; where it was raised if no such code is involved."""
    library = (
        os.path.dirname(os.__file__),
        *(path for path in sys.path if "site-packages" in path),
        "<frozen",
    )
    place, is_users = {}, False
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(library) or not is_users:
            is_users = not code.co_filename.startswith(library)
            place = {"file": code.co_filename, "line": trace.tb_lineno, "function": code.co_name}
        trace = trace.tb_next
    return place


def flush_open_files() -> None:
    """Flushes the standard streams and every regular file open for writing, as a normal exit would."""
    import gc
    import io
    import stat

    for stream in (sys.stdout, sys.stderr):
        _quietly(lambda stream=stream: stream.flush())
    writers = [item for item in gc.get_objects() if type(item) in (io.TextIOWrapper, io.BufferedWriter)]
    for file in sorted(
        writers, key=lambda item: type(item) is io.BufferedWriter
    ):  # text first, it fills buffers
        # Only regular files: the flush of a pipe or socket may wait for a reader that will never come.
        _quietly(lambda file=file: stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.flush())


def leave_at_once(code: int) -> "NoReturn":
    """Flushes and ends the process without atexit handlers (see the module docstring)."""
    flush_open_files()
    os._exit(code)


def _quietly(action: "Callable[[], object]") -> None:
    try:
        action()
    except Exception:  # closed, broken, detached: this process is ending anyway
        pass


if __name__ == "__main__":
    main()
