"""Tensor-parallel benchmark: both contenders train the same model, and results are judged as the page says."""

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from jaxpar.mesh import init_device_mesh

FOLDER = Path(__file__).parents[2] / "benchmarks"
FACTS = {
    "jaxpar": {"step_s": 0.1, "collectives": {"all_reduce": 12}, "sent_bytes": 1 << 20, "device_bytes": 3 << 20},
    "by hand": {"step_s": 0.2, "collectives": {"all_reduce": 14}, "sent_bytes": 2 << 20, "device_bytes": 2 << 20},
}  # fmt: skip


def load(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_steps_train_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sequence parallelism; the worker itself compares the losses of all that it has timed."""
    worker: Any = load(monkeypatch, "_tp_jax")
    tiny = dataclasses.replace(worker.SMALL, vocab=16, width=16, depth=1, heads=2, kv_heads=2, hidden=16)
    monkeypatch.setattr(worker, "SMALL", tiny)
    mesh = init_device_mesh((1, 2), ("dp", "tp"), devices=jax.devices()[:2])
    batch = np.random.default_rng(0).integers(0, tiny.vocab, (4, 9), dtype=np.int32)
    ours, by_hand = (worker.make(name, "sequence", mesh) for name in ("jaxpar", "by hand"))
    losses = [(float(ours(batch)), float(by_hand(batch))) for _ in range(3)]
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-5)
    assert losses[2][0] < losses[1][0] < losses[0][0]


def test_steps_are_judged_by_the_annotated_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tp: Any = load(monkeypatch, "tp")
    step, throughput = tp.step_results({"2 processes": {"sequence": FACTS}})
    assert (step.config, step.ratio, step.ok) == ("2 processes, sequence parallel", 0.5, True)
    assert (throughput.value, throughput.unit, throughput.ratio) == (10240.0, "tokens/s", 2.0)


def test_programs_are_compared_once_for_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    tp: Any = load(monkeypatch, "tp")
    rows = list(tp.program_results({"1": {"tensor": FACTS}, "2": {"tensor": FACTS}}))
    assert [(row.metric, row.value, row.baseline_value) for row in rows] == [
        ("collectives", 12, 14), ("sent", 1.0, 2.0), ("peak", 3.0, 2.0)
    ]  # fmt: skip
    assert "12 all_reduce" in rows[0].unit and "14 all_reduce" in rows[0].baseline


def test_a_device_of_the_ring_needs_its_share_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tp: Any = load(monkeypatch, "tp")
    needs = {"dense": 1 << 40, "1": 1 << 29, "8": 1 << 29}
    monkeypatch.setattr(tp, "run_worker", lambda *arguments, layout: needs)
    one, eight = tp.attention_results([1, 8])
    assert (one.ok, eight.ok) == (True, False)
    assert eight.ratio == 2**-11 and eight.target == "ratio <= 0.000125"
