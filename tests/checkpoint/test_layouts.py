"""Saved in one layout, restored in another: every array to the last bit, and the next steps as if nothing had happened."""

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from rig import SIZES, Run, run

from jaxpar.checkpoint import CheckpointManager

SAVED_AT, LAST = 2, 5


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Every layout, compiled once."""
    return {layout: run(layout) for layout in SIZES}


@pytest.fixture(scope="module")
def saved(runs: Mapping[str, Run], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each layout after two steps, written in the background while it trains on."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for layout, one in runs.items():
        one.train(0, SAVED_AT)
        with CheckpointManager(folder / layout) as manager:
            manager.save(SAVED_AT, one.model, one.optimizer)
            one.at_save = one.state()  # pyright: ignore[reportAttributeAccessIssue]
            one.losses = one.train(SAVED_AT, LAST)  # pyright: ignore[reportAttributeAccessIssue]
    return {layout: folder / layout for layout in runs}


@pytest.mark.parametrize("source", SIZES)
@pytest.mark.parametrize("target", SIZES)
def test_any_layout_continues_from_any_other(
    runs: Mapping[str, Run], saved: Mapping[str, Path], source: str, target: str
) -> None:
    here, before = runs[target], runs[source].at_save  # pyright: ignore[reportAttributeAccessIssue]
    with CheckpointManager(saved[source]) as manager:
        found = manager.restore(here.model, here.optimizer)
    assert found is not None and found.step == SAVED_AT
    after = here.state()
    assert after.keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    np.testing.assert_allclose(here.train(SAVED_AT, LAST), runs["one"].losses, rtol=1e-6)  # pyright: ignore
