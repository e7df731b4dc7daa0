"""One checkpoint goes from one device to stages over processes and back, a step in each; the losses are those of one device."""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from rig import run  # pyright: ignore[reportMissingImports]

from jaxpar.checkpoint import CheckpointManager
from jaxpar_launch import launch

WORKER = Path(__file__).parent / "workers" / "checkpoint.py"
# Layout, processes, devices of each: a stage in each process.
ROUND = (("pipeline", 2, 4),)


def test_a_checkpoint_goes_round_layouts_and_numbers_of_processes(tmp_path: Path) -> None:
    folder, one = tmp_path / "checkpoints", run("one")
    one.train(0, 1)
    with CheckpointManager(folder) as manager:
        manager.save(1, one.model, one.optimizer)
    before, losses = one.state(), []
    expected = one.train(1, len(ROUND) + 2)
    layout = ""
    for last, (layout, nproc, devices) in enumerate(ROUND, start=2):
        command = [WORKER, layout, folder, str(last)]
        said = launch(command, nproc=nproc, devices_per_proc=devices, timeout_s=120).check().output
        assert_equal(whole(tmp_path, "restored", nproc), before)
        before = whole(tmp_path, "saved", nproc)
        found = {line for text in said for line in text.splitlines() if line.startswith("losses")}
        assert len(found) == 1, found
        losses.append(float(found.pop().split()[1]))
    last = len(ROUND) + 1
    with CheckpointManager(folder) as manager:
        restored = manager.restore(one.model, one.optimizer)
        assert restored is not None
        assert (restored.step, restored.data_state, restored.extra) == (
            last,
            {"layout": layout},
            {"note": layout},
        )
    assert_equal(one.state(), before)
    np.testing.assert_allclose([*losses, *one.train(last, last + 1)], expected, rtol=1e-6)


def whole(folder: Path, when: str, nproc: int) -> dict[str, np.ndarray]:
    """Arrays put together from the parts of all processes, which must cover them and agree where they overlap."""
    parts = [pickle.loads((folder / f"pieces-{when}-{rank}").read_bytes()) for rank in range(nproc)]
    assert all(part.keys() == parts[0].keys() for part in parts)
    return {name: _joined(name, [part[name] for part in parts]) for name in parts[0]}


def _joined(name: str, found: list[Any]) -> np.ndarray:
    shape = found[0][0]
    stored = next(stored for _, stored, parts in found if parts)
    out, seen = None, np.zeros(stored, bool)
    for place, value in _places(found):
        out = np.zeros(stored, value.dtype) if out is None else out
        np.testing.assert_array_equal(
            out[place][seen[place]], value[seen[place]], err_msg=f"replicas of {name}"
        )
        out[place], seen[place] = value, True
    assert out is not None and seen.all(), name
    return out.reshape(-1)[: int(np.prod(shape))].reshape(shape)


def _places(found: list[Any]) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    for _, _, parts in found:
        for ranges, value in parts:
            yield tuple(slice(*r) for r in ranges), value


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
