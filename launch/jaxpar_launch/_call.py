"""The way of a function to the workers and of its values back: by name where a worker can find it, else by cloudpickle.

    function of a module          by name: the worker imports the module
    of a script, of `python -m`   by name: the worker loads it as multiprocessing would (`_called.py`)
    of a notebook; a lambda, or   by value, if cloudpickle is installed
    one made by a function

`functools.partial`, methods and callable objects go with what they hold. Values come back from one's own workers only, through a
folder that nobody else can read.
"""

import contextlib
import inspect
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

from jaxpar_launch._called import MAIN_NAMES, pickled_by_value
from jaxpar_launch._errors import LaunchFailedError, LaunchSpecError
from jaxpar_launch._files import RunFolder
from jaxpar_launch._spec import LaunchSpec

Job = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Callable[..., object]


@contextlib.contextmanager
def complete(
    spec: LaunchSpec, job: Job | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[LaunchSpec]:
    """The spec with its command; of a function, a file that is there until the job has ended.

    Raises:
        LaunchSpecError: there are two commands, or none; the function or an argument cannot be sent.
    """
    if job is None and spec.command is None:
        raise LaunchSpecError("launch: nothing to run. Write launch(spec, function).")
    if job is not None and spec.command is not None:
        raise LaunchSpecError(
            f"launch: the LaunchSpec runs {' '.join(spec.command)!r} already. Leave its command or the second argument out."
        )
    if job is not None and callable(job):
        if spec.python != sys.executable:
            raise LaunchSpecError(
                f"launch: python={spec.python!r}, but a function can only run where it was made, in {sys.executable!r}."
            )
        with contextlib.closing(RunFolder.make(log_dir=None, run_id=spec.run_id, is_kept=False)) as folder:
            path = os.path.join(folder.path, "call.pickle")
            _write_call(path, (job, tuple(args), dict(kwargs)))
            yield replace(spec, kind="function", command=(path,))
        return
    if args or kwargs:
        raise LaunchSpecError(
            "launch: args and kwargs are a function's; a script's stand behind it: [script, argument]."
        )
    if job is None:
        yield spec
    else:
        parts = [job] if isinstance(job, str | os.PathLike) else job
        yield replace(spec, command=tuple(os.fspath(part) for part in parts))


def _write_call(path: str, call: tuple[Any, ...]) -> None:
    body = io.BytesIO()
    writer = _CallWriter(body)
    try:
        writer.dump(call)
        data, files = body.getvalue(), writer.files
    except Exception as error:
        data, files = _by_value(call, error), {}
    header = {"path": sys.path, "argv": sys.argv, "main": _main_of(), "files": files}
    with open(path, "wb") as file:
        file.write(pickle.dumps(header) + data)


def read_values(data: Mapping[int, bytes]) -> dict[int, Any]:
    """What the workers returned, by rank; None from one that left by `sys.exit(0)`.

    Raises:
        LaunchFailedError: a value cannot be made here.
    """
    values = {}
    for rank, item in sorted(data.items()):
        try:
            values[rank] = _ValueReader(io.BytesIO(item)).load() if item else None
        except Exception as error:
            raise LaunchFailedError(
                f"launch: rank {rank} returned a value that cannot be read here: {type(error).__name__}: {error}."
            ) from error
    return values


def check_not_loading() -> None:
    """A script that launches at its top level would launch again in every worker that loads it.

    Raises:
        LaunchSpecError: this is such a worker.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            raise LaunchSpecError(
                f"launch is called at line {frame.f_lineno} of {frame.f_code.co_filename} while a worker loads this script to "
                "find its function. Put the call under `if __name__ == '__main__':`."
            )
        frame = frame.f_back


class _CallWriter(pickle.Pickler):
    """Pickles by name only what a worker will find; notes the files of the modules."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.files: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Looks at each function and class; all is pickled as usual."""
        if isinstance(obj, FunctionType | type):
            module = obj.__module__
            if module in MAIN_NAMES:
                if _main_of() is None or not os.path.exists(_file_of(obj)):
                    raise pickle.PicklingError(f"{obj.__qualname__} was made in a notebook, or typed in")
            elif file := getattr(sys.modules.get(module), "__file__", None):
                self.files[module] = file
        return NotImplemented


class _ValueReader(pickle.Unpickler):
    """Finds in this process what a worker calls `__mp_main__`."""

    def find_class(self, module: str, name: str) -> Any:
        """The function or class of this name."""
        return super().find_class("__main__" if module in MAIN_NAMES else module, name)


def _main_of() -> tuple[str, str] | None:
    """How a worker can load what is `__main__` here."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name != "__main__":  # not a folder or zip that was run by its path
        return "module", spec.name
    return ("script", os.path.abspath(file)) if file and os.path.isfile(file) else None


def _file_of(obj: Any) -> str:
    code = getattr(inspect.unwrap(obj), "__code__", None)
    return code.co_filename if code is not None else os.curdir  # a class is of its module


def _by_value(call: tuple[Any, ...], error: Exception) -> bytes:
    try:
        data = pickled_by_value(call)
        hint = (
            "Put the function at the top level of a module or script; or install cloudpickle, which sends lambdas and the "
            "functions of notebooks too."
        )
    except Exception as last:
        data, error = None, last
        hint = "Arguments must be plain data: open files, locks and the like stay where they are."
    if data is None:
        name = getattr(call[0], "__qualname__", repr(call[0]))
        raise LaunchSpecError(
            f"launch: {name} and its arguments cannot be sent to workers: {error}. {hint}"
        ) from error
    return data
