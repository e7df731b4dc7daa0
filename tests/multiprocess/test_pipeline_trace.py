"""A step over processes is traced as one timeline; unequal microbatches, several runs and evaluation are as on one device.

A random key that is assigned between steps, and that stages on both processes use, is theirs by either transport.
"""

import json
from pathlib import Path

import numpy as np

from jaxpar.pp import get_schedule
from jaxpar_launch import launch

WORKER = Path(__file__).parent / "workers" / "pipeline_trace.py"


def said(output: str, word: str) -> str:
    (line,) = (line for line in output.splitlines() if line.startswith(f"{word} "))
    return line.removeprefix(f"{word} ")


def test_two_processes_are_one_timeline(tmp_path: Path) -> None:
    outputs = {}
    for nproc in (1, 2):
        folder = tmp_path / str(nproc)
        folder.mkdir()
        outputs[nproc] = (
            launch([WORKER, folder], nproc=nproc, devices_per_proc=2 // nproc, timeout_s=120).check().output
        )
        trace = json.loads((folder / "pp.json").read_text())["traceEvents"]
        slices = [(e["pid"], e["tid"], e["name"]) for e in trace if e["ph"] == "X"]
        assert len(slices) == len(set(slices)) == 2 * 12
        assert (folder / "pp.svg").exists()
    rows = [[str(a) for a in row if a is not None] for row in get_schedule("1F1B", 2, 3).rows]
    everyone = [*outputs[1], *outputs[2]]
    assert [said(output, "rows") for output in everyone] == [str(rows)] * 3
    losses = [json.loads(said(output, "losses")) for output in everyone]
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-6)
    for before, evaluated, after in losses:
        assert after < before
        np.testing.assert_allclose(evaluated, after, rtol=1e-6)
    noisy = np.concatenate([json.loads(said(output, "noisy")) for output in everyone])  # runs, steps
    np.testing.assert_allclose(noisy, noisy[:1].repeat(1 + 2 * 2, 0), rtol=1e-6)
    assert len(set(noisy[0, :3])) == 3
    np.testing.assert_allclose(noisy[:, 3], noisy[:, 0], rtol=1e-6)
