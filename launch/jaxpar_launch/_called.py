"""A worker that is a function: takes the call from a file, makes it, and leaves the value beside the error file.

    python _run.py ERROR_FILE script _called.py CALL_FILE VALUE_FILE

    CALL_FILE    a dict: "path" and "argv" of the launcher, its "main", the "files" of modules; then (function, args, kwargs)
    __main__     the launcher's own script, loaded here under the name __mp_main__, as multiprocessing does, so that what stands
                 under `if __name__ == "__main__":` is left out; only if the call needs something of it

This file must stand alone, as `_run.py` must. It unpickles what the launcher wrote into a folder that nobody else can read.
"""

import importlib
import importlib.util
import os
import pickle
import sys
from types import ModuleType
from typing import IO, Any

MAIN_NAMES = ("__main__", "__mp_main__")


def main() -> None:
    """Entry point."""
    call_file, value_file = sys.argv[1:3]
    with open(call_file, "rb") as file:
        header = pickle.load(file)
        sys.path[:], sys.argv[:] = header["path"], header["argv"]
        function, args, kwargs = _CallReader(file, header).load()
    value = function(*args, **kwargs)
    try:
        data = _pickled(value)
    except Exception as error:
        raise TypeError(
            f"a {type(value).__name__} was returned, which cannot be sent to the launcher: {error}. Return numbers, text, "
            "NumPy arrays or containers of them; save what is large, and return its path."
        ) from error
    with open(value_file, "wb") as file:
        file.write(data)


def _pickled(value: object) -> bytes:
    """With cloudpickle where pickle cannot: objects of a class that a notebook or a function made."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        if (data := pickled_by_value(value)) is None:
            raise
        return data


def pickled_by_value(value: object) -> bytes | None:
    """Functions and classes with their code; None without cloudpickle, which is not needed, but welcome."""
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        return None
    return cloudpickle.dumps(value)


class _CallReader(pickle.Unpickler):
    """Finds functions and classes in the launcher's modules."""

    def __init__(self, file: IO[bytes], header: dict[str, Any]) -> None:
        super().__init__(file)
        self._main, self._files = header["main"], header["files"]
        self._has_main = False

    def find_class(self, module: str, name: str) -> Any:
        """The function or class of this name."""
        if module not in MAIN_NAMES:
            self._import(module)
            return super().find_class(module, name)
        if not self._has_main:
            self._has_main = True
            _load_main(*self._main)
        try:
            return super().find_class("__main__", name)
        except AttributeError as error:
            raise AttributeError(
                f"{name} is not there when {self._main[1]} is loaded by a worker. Define it at the top level, not under "
                "`if __name__ == '__main__':`."
            ) from error

    def _import(self, name: str) -> None:
        """By name, as anywhere; else from its file, for the launcher may have loaded it in another way."""
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            is_missing = error.name is not None and f"{name}.".startswith(f"{error.name}.")
            if not is_missing or name not in self._files:
                raise
            spec = importlib.util.spec_from_file_location(name, self._files[name])
            assert spec is not None and spec.loader is not None
            _make_parents(name)
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)


def _make_parents(name: str) -> None:
    """Empty packages above a module that was found by its file: pickle asks for them when it names a class of it."""
    parts = name.split(".")
    for parent in (".".join(parts[:i]) for i in range(1, len(parts))):
        if parent not in sys.modules:
            package = sys.modules[parent] = ModuleType(parent)
            package.__path__ = []


def _load_main(kind: str, name: str) -> None:
    """Runs the launcher's script ("script", a path) or module ("module", a name) as `__mp_main__`."""
    module = ModuleType("__mp_main__")
    if kind == "module":
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        code = spec.loader.get_code(name)  # pyright: ignore[reportAttributeAccessIssue]
        module.__dict__.update(__file__=spec.origin, __spec__=spec, __package__=spec.parent)
    else:
        with open(name, "rb") as source:
            code = compile(source.read(), name, "exec", dont_inherit=True)
        module.__dict__.update(__file__=os.path.abspath(name), __builtins__=__builtins__)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
