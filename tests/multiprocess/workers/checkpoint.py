"""Restores the latest checkpoint into a layout over all processes, trains on and saves: `checkpoint.py LAYOUT FOLDER LAST`.

Writes the parts of every array that this process has, before training and after, to FOLDER/../pieces-WHEN-RANK.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "checkpoint"))
from rig import Run, run  # pyright: ignore[reportMissingImports]

import jaxpar
from jaxpar._named import named_arrays
from jaxpar.checkpoint import CheckpointManager
from jaxpar.mesh import destroy_process_group, get_rank


def pieces(here: Run) -> dict[str, Any]:
    """By name: shape of the model, shape stored, and this process's parts with their places."""
    found = {}
    for part, module in {"model": here.model, "optimizer": here.optimizer}.items():
        for array in named_arrays(module):
            x = jax.random.key_data(array.value) if array.is_key and _is_here(array.value) else array.value
            shards = x.addressable_shards if _is_here(array.value) else []
            parts = [(_ranges(s.index, x.shape), np.asarray(s.data)) for s in shards]
            found[f"{part}.{array.name}"] = (array.shape, x.shape, parts)
    return found


def _is_here(x: Any) -> bool:
    return bool(x.sharding.addressable_devices)


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]


def main() -> None:
    layout, folder, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    jaxpar.init_process_group()
    here = run(layout, seed=1)
    with CheckpointManager(folder, keep=None) as manager:
        found = manager.restore(here.model, here.optimizer, step=last - 1)
        assert found is not None
        write(folder, "restored", here)
        losses = here.train(found.step, last)
        write(folder, "saved", here)
        manager.save(last, here.model, here.optimizer, data_state={"layout": layout}, extra={"note": layout})
    print("losses", *losses, flush=True)
    destroy_process_group()


def write(folder: Path, when: str, here: Run) -> None:
    (folder.parent / f"pieces-{when}-{get_rank()}").write_bytes(pickle.dumps(pieces(here)))


if __name__ == "__main__":
    main()
