"""One checkpoint goes from one device to stages over processes and back, a step in each; the losses are those of one device.

`python tests/multiprocess/test_checkpoint.py` sends it through all 25 pairs of five layouts, each in turn on 1, 2 and 4 processes.
"""

import itertools
import pickle
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from rig import run  # pyright: ignore[reportMissingImports]

from jaxpar.checkpoint import CheckpointManager
from jaxpar_launch import launch

WORKER = Path(__file__).parent / "workers" / "checkpoint.py"
Stop = tuple[str, int, int]  # layout, processes, devices of each
PROCESSES = {
    "one": ((1, 1),),
    "zero1": ((2, 1), (1, 2)),
    "fsdp": ((4, 1), (2, 2), (1, 4)),
    "fsdp-tp": ((2, 2), (4, 1), (1, 4)),
    "pipeline": ((2, 4), (4, 2), (1, 8)),
}


def test_a_checkpoint_goes_round_layouts_and_numbers_of_processes(tmp_path: Path) -> None:
    """A stage in each process."""
    go_round(tmp_path, [("pipeline", 2, 4)])


def go_round(tmp_path: Path, stops: Sequence[Stop]) -> None:
    """One step on one device, one at each stop, and one on one device again."""
    folder, one = tmp_path / "checkpoints", run("one")
    one.train(0, 1)
    with CheckpointManager(folder) as manager:
        manager.save(1, one.model, one.optimizer)
    before, losses = one.state(), []
    expected = one.train(1, len(stops) + 2)
    layout = ""
    for last, (layout, nproc, devices) in enumerate(stops, start=2):
        command = [WORKER, layout, folder, str(last)]
        said = launch(command, nproc=nproc, devices_per_proc=devices, timeout_s=120).check().output
        assert_equal(whole(tmp_path, "restored", nproc), before)
        before = whole(tmp_path, "saved", nproc)
        found = {line for text in said for line in text.splitlines() if line.startswith("losses")}
        assert len(found) == 1, found
        losses.append(float(found.pop().split()[1]))
    last = len(stops) + 1
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


def every_pair() -> Iterator[Stop]:
    """A way through all pairs of layouts, from and to one device."""
    left = {layout: list(PROCESSES) for layout in PROCESSES}
    way, found = ["one"], []
    while way:
        if left[way[-1]]:
            way.append(left[way[-1]].pop())
        else:
            found.append(way.pop())
    found.reverse()
    assert len(set(itertools.pairwise(found))) == len(PROCESSES) ** 2
    turns = {layout: itertools.cycle(sizes) for layout, sizes in PROCESSES.items()}
    for layout in found[1:]:
        yield (layout, *next(turns[layout]))


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


if __name__ == "__main__":
    import jax

    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        go_round(Path(scratch), stops := list(every_pair()))
    print("equal:", *(f"{layout} ({nproc} x {devices})" for layout, nproc, devices in stops), sep="\n  -> ")
