"""Tensors of one file or of a folder with an index, read a slice at a time with the safetensors package."""

import json
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar._errors import CheckpointError
from jaxpar.checkpoint._safetensors_write import CODES, INDEX, SINGLE
from jaxpar.checkpoint._tensors import Index

DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class TensorFiles:
    """Open files.

    Args:
        slices: by name, what gives shape, dtype and parts of a tensor.
        files: by name, the file that holds the tensor.
    """

    slices: dict[str, Any]
    files: dict[str, Path]

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator["TensorFiles"]:
        """Opens the files of a folder, or one file; headers are read, tensors are not.

        Raises:
            CheckpointError: there are none, one is missing or damaged, or the package is not installed.
        """
        package, slices, files = _package(), {}, {}
        wanted = _weight_map(path)
        with ExitStack() as stack:
            for file in _files(path, wanted):
                handle = stack.enter_context(_opened(package, file))
                for name in handle.keys():
                    slices[name], files[name] = handle.get_slice(name), file
            lost = [name for name in wanted if name not in slices]
            if lost:
                raise CheckpointError(
                    f"{path / INDEX} lists {len(lost)} tensors that its files do not hold, first {lost[0]!r} in {wanted[lost[0]]}. "
                    f"Files of different exports are mixed: copy or download the folder anew."
                )
            yield cls(slices, files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(self.slices[name].get_shape())

    def dtype(self, name: str) -> np.dtype | str:
        """Of a tensor; its code in the file if NumPy has no such dtype."""
        code = self.slices[name].get_dtype()
        return DTYPES[code] if code in DTYPES else code

    def read(self, name: str, index: Index) -> np.ndarray:
        """A part of a tensor.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            return self.slices[name][index if index else ...]
        except Exception as error:
            raise CheckpointError(
                f"{self.files[name]}: {name} cannot be read ({type(error).__name__}: {error})."
            ) from error


def _package() -> types.ModuleType:
    try:
        import safetensors
    except ImportError as error:
        raise CheckpointError(
            "load_safetensors reads with the package safetensors, which is not installed: pip install 'jaxpar[hf]'."
        ) from error
    return safetensors


def _weight_map(path: Path) -> dict[str, str]:
    """Which file holds which tensor, if there is an index."""
    index = path / INDEX
    if not index.exists():
        return {}
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read ({type(error).__name__}: {error}).") from error


def _files(path: Path, wanted: dict[str, str]) -> list[Path]:
    if wanted:
        return [path / name for name in dict.fromkeys(wanted.values())]
    file = path / SINGLE if path.is_dir() else path
    if not file.exists():
        raise CheckpointError(
            f"load_safetensors: there is neither {path / INDEX} nor {path / SINGLE}. Name the folder that save_safetensors, or "
            f"save_pretrained of transformers, has written, or one .safetensors file."
        )
    return [file]


def _opened(package: types.ModuleType, file: Path) -> Any:
    try:
        return package.safe_open(file, framework="numpy")
    except Exception as error:
        raise CheckpointError(
            f"{file} is missing, cut short or no safetensors file ({type(error).__name__}: {error})."
        ) from error
