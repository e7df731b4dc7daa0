"""A pipeline over 2 processes equals one device in float64, whichever way activations travel: steps of AdamW, dropout, clipping.

PP6, W8: loss and metrics are on every process, not only on the last stage's. 4 processes, whose inner ranks hear from both sides,
walk every named schedule in test_pipeline_schedules.py; collectives inside a stage are the same program wherever its devices are.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar_launch import launch

WORKERS = Path(__file__).parent / "workers"
sys.path.insert(0, str(WORKERS))
import pipeline_models as models  # noqa: E402

RTOL = 1e-12
Found = dict[str, dict[str, np.ndarray]]


def train(folder: Path, *, nproc: int, devices: int) -> Found:
    """What rank 0 found for each case, after checking that all ranks have the same metrics."""
    result = launch(
        [WORKERS / "pipeline.py", folder], nproc=nproc, devices_per_proc=devices, timeout_s=240
    ).check()
    cases = models.cases(nproc, nproc * devices)
    for case in cases:
        said = {
            line for output in result.output for line in output.splitlines() if line.startswith(case.name)
        }
        assert len(said) == 1, said
    return {case.name: dict(np.load(folder / f"{case.name}.npz")) for case in cases}


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        metrics, params = models.train(models.ONE_DEVICE)
    arrays = {f"arr_{i}": x for i, x in enumerate(params)}
    return arrays | {name: np.array(values) for name, values in metrics.items()}


@pytest.mark.parametrize("devices", [1, 2])
def test_a_pipeline_over_processes_equals_one_device(
    devices: int, tmp_path: Path, on_one_device: dict[str, np.ndarray]
) -> None:
    for case, found in train(tmp_path, nproc=2, devices=devices).items():
        assert found.keys() == on_one_device.keys() >= {"loss", "grad_norm", "size", "arr_0"}
        for name, expected in on_one_device.items():
            np.testing.assert_allclose(found[name], expected, rtol=RTOL, atol=RTOL, err_msg=f"{case} {name}")
