"""A job whose worker is killed continues from its last checkpoint: every sample once, the losses of an undisturbed process.

`benchmarks/survive.py` does the same fifty times at random moments, and lets hosts come and go.
"""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _survive_job import trace  # pyright: ignore[reportMissingImports]
from _survive_worker import train  # pyright: ignore[reportMissingImports]
from survive import Tally, killed_job  # pyright: ignore[reportMissingImports]


def test_a_killed_worker_costs_steps_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # compiling takes most of the time
    monkeypatch.setenv("JAXPAR_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    train(tmp_path / "undisturbed")
    reference = trace(tmp_path / "undisturbed").losses
    tally = Tally(wanted=1)
    killed_job(tmp_path / "killed", random.Random(3), tally)
    found = trace(tmp_path / "killed")
    assert tally.done == 1 and set(found.worlds.values()) == {2}
    assert found.faults(rtol=1e-5, reference=reference) == []
    lost = reference | {7: reference[7] + 1e-3}
    assert found.faults(rtol=1e-5, reference=lost) != []  # a loss of another run is seen
