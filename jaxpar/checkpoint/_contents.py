"""What a checkpoint holds, as JSON beside the arrays: readable with no device, no jax and no model.

{"format": 1, "step": 400, "arrays": {"model": {"blocks.0.kernel": {"dtype": "float32", "shape": [512, 128], ..}}, ..},
 "data_state": {"epoch": 1, "offset": 6400, ..}, "extra": {}, "mesh": .., "num_processes": 4, "saved_at": "2026-05-01T12:00:00Z"}
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxpar._errors import CheckpointError

FORMAT = 1
FILE = Path("contents") / "metadata"  # where Orbax's JSON handler puts the item `contents`


def contents(
    step: int,
    arrays: Mapping[str, Mapping[str, Mapping[str, Any]]],
    *,
    data_state: Any,
    extra: Mapping[str, Any],
    metrics: Mapping[str, float],
    num_processes: int,
    num_devices: int,
) -> dict[str, Any]:
    """The description that is written.

    Raises:
        CheckpointError: `data_state` or `extra` holds what JSON cannot.
    """
    found = {
        "format": FORMAT,
        "step": step,
        "arrays": {group: dict(found) for group, found in arrays.items()},
        "data_state": data_state,
        "extra": dict(extra),
        "metrics": {name: float(value) for name, value in metrics.items()},
        "num_processes": num_processes,
        "num_devices": num_devices,
        "jaxpar": version("jaxpar"),
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for name in ("data_state", "extra"):
        _check_json(name, found[name])
    return found


def read_contents(folder: Path) -> dict[str, Any]:
    """Reads the description of one checkpoint.

    Raises:
        CheckpointError: there is none, or it was written by a later version.
    """
    try:
        found = json.loads((folder / FILE).read_text())
        written = found["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} is no checkpoint of jaxpar: {folder / FILE} cannot be read ({type(error).__name__}: {error}). "
            f"Name the folder that was given to CheckpointManager; its steps are the folders with numbers."
        ) from error
    if written > FORMAT:
        raise CheckpointError(
            f"{folder} was written in format {written} by jaxpar {found.get('jaxpar')}; this version reads up to {FORMAT}. "
            f"Install a newer jaxpar."
        )
    return found


def difference_lines(
    saved: Mapping[str, Mapping[str, Any]], here: Mapping[str, Mapping[str, Any]], *, strict: bool
) -> list[str]:
    """What does not fit between the arrays of a checkpoint and those of a model: one line for each name."""
    lines = []
    for name, wanted in here.items():
        found = saved.get(name)
        if found is None:
            if strict:
                lines.append(
                    f"{name}: missing from the checkpoint ({wanted['dtype']}{list(wanted['shape'])})"
                )
            continue
        for fact in ("shape", "dtype", "key"):
            if _plain(found.get(fact)) != _plain(wanted.get(fact)):
                lines.append(f"{name}: {fact} {found.get(fact)} in the checkpoint, {wanted.get(fact)} here")
    if strict:
        lines += [
            f"{name}: in the checkpoint, and no variable has this name" for name in saved if name not in here
        ]
    return lines


def _plain(fact: Any) -> Any:
    return list(fact) if isinstance(fact, Sequence) and not isinstance(fact, str) else fact


def _check_json(name: str, value: Any) -> None:
    try:
        same = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{name} cannot be written as JSON: {error}. Give numbers, strings, lists and dicts of them; arrays go into an "
            f"nnx.Module, as extra={{'ema': module}}."
        ) from error
    if same != _lists(value):
        raise CheckpointError(
            f"{name} would come back changed from JSON: {value!r} as {same!r}. Keys of dicts are strings, numbers finite."
        )


def _lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _lists(x) for key, x in value.items()}
    return [_lists(x) for x in value] if isinstance(value, list | tuple) else value
