"""Training on 2 and 4 processes equals one device on the union batch: DDP, FSDP, hybrid, tensor and context parallel."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar_launch import launch

WORKERS = Path(__file__).parent / "workers"
sys.path.insert(0, str(WORKERS))
import train_step_models as models  # noqa: E402

Found = dict[tuple[str, int, str], dict[str, np.ndarray]]


def train(folder: Path, *, nproc: int, devices: int) -> Found:
    """What rank 0 found for each case, after checking that all ranks found the same losses."""
    np.savez(folder / "batch.npz", **models.make_batch())
    command = [WORKERS / "train_step.py", folder]
    result = launch(command, nproc=nproc, devices_per_proc=devices, timeout_s=300).check()
    said = [
        [line for line in output.splitlines() if line.startswith(tuple(models.MODELS))]
        for output in result.output
    ]
    cases = models.CASES if nproc < 4 else models.FEW_CASES
    assert len(said[0]) == len(cases)
    assert all(lines == said[0] for lines in said)
    files = {case: f"result-{'-'.join(map(str, case))}.npz" for case in cases}
    return {case: dict(np.load(folder / file)) for case, file in files.items()}


@pytest.fixture(scope="module")
def on_one_device() -> Found:
    found = {}
    for case in models.CASES:
        name, accumulate, strategy = case
        losses, params = models.train(
            name, models.make_batch(), accumulate=accumulate, strategy=strategy, devices=jax.devices()[:1]
        )
        found[case] = {f"arr_{i}": x for i, x in enumerate(params)} | {"losses": np.array(losses)}
    return found


@pytest.mark.parametrize(("nproc", "devices"), [(2, 2), (4, 1)])
def test_processes_equal_one_device(nproc: int, devices: int, tmp_path: Path, on_one_device) -> None:
    for case, found in train(tmp_path, nproc=nproc, devices=devices).items():
        expected = on_one_device[case]
        assert found.keys() == expected.keys()
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-6, err_msg=str(case))
        for name in found.keys() - {"losses"}:
            np.testing.assert_allclose(
                found[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=f"{case} {name}"
            )
