"""Training on 2 and 4 processes equals one device on the union batch: MLP with dropout, ResNet, transformer."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jaxpar_launch import launch

from jaxpar.mesh import init_device_mesh

WORKERS = Path(__file__).parent / "workers"
sys.path.insert(0, str(WORKERS))
import train_step_models as models  # noqa: E402


@pytest.fixture(scope="module")
def on_one_device() -> dict[tuple[str, int], tuple[list[float], list[np.ndarray]]]:
    mesh = init_device_mesh((1,), ("dp",), devices=jax.devices()[:1])
    batch = models.make_batch()
    return {(name, n): models.train(name, batch, mesh, accumulate=n) for name, n in models.CASES}


@pytest.mark.parametrize(("nproc", "devices"), [(2, 2), (4, 1)])
def test_processes_equal_one_device(nproc: int, devices: int, tmp_path: Path, on_one_device) -> None:
    np.savez(tmp_path / "batch.npz", **models.make_batch())
    command = [WORKERS / "train_step.py", tmp_path]
    environ = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # halves the time: every process compiles every program
    result = launch(command, nproc=nproc, devices_per_proc=devices, environ=environ, timeout_s=300).check()

    said = [
        [line for line in output.splitlines() if line.startswith(tuple(models.MODELS))]
        for output in result.output
    ]
    assert len(said[0]) == len(models.CASES)
    assert all(lines == said[0] for lines in said)
    for (name, accumulate), (losses, arrays) in on_one_device.items():
        found = np.load(tmp_path / f"result-{name}-{accumulate}.npz")
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-6, err_msg=name)
        for index, expected in enumerate(arrays):
            np.testing.assert_allclose(found[f"arr_{index}"], expected, rtol=1e-5, atol=1e-6, err_msg=name)
