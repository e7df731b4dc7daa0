"""The contract of `benchmarks/`: what a result says, how contenders take turns, how the README's table is kept."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


common, runner = load("_common"), load("__main__")


def result(**fields: object):
    return common.Result(**{"bench": "b", "config": "c", "metric": "m", "value": 2.0, "unit": "ms"} | fields)


def test_a_result_is_one_json_line_with_the_agreed_keys() -> None:
    line = result(baseline="other", baseline_value=4.0, target="ratio <= 0.6").to_json()
    assert json.loads(line) == {
        "bench": "b", "config": "c", "metric": "m", "value": 2.0, "unit": "ms", "baseline": "other",
        "baseline_value": 4.0, "ratio": 0.5, "target": "ratio <= 0.6", "ok": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("target", "baseline_value", "ok"),
    [
        ("ratio <= 0.5", 4.0, True),
        ("ratio < 0.5", 4.0, False),
        ("value >= 2", None, True),
        ("value > 2", None, False),
        ("value == 2", None, True),
        ("ratio <= 0.5", None, None),
        (None, 4.0, None),
    ],
)
def test_ok_is_the_target_applied(target, baseline_value, ok) -> None:
    judged = result(target=target, baseline="other", baseline_value=baseline_value)
    assert judged.ok is ok


def test_an_unreadable_target_is_refused() -> None:
    with pytest.raises(ValueError, match="not of the form 'ratio <= 1.02'"):
        result(target="fast")


def test_a_missed_target_is_the_exit_code(capsys) -> None:
    assert common.emit(result(target="value <= 2"), result(target=None)) == 0
    assert common.emit(result(target="value < 2")) == 1
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_contenders_take_turns_and_medians_are_of_measured_rounds_only() -> None:
    order = []
    values = {"a": iter([100.0, 1.0, 2.0, 30.0]), "b": iter([100.0, 4.0, 5.0, 6.0])}

    def contender(name: str):
        return lambda: order.append(name) or next(values[name])

    medians = common.interleave({name: contender(name) for name in values}, rounds=3)
    assert medians == {"a": 2.0, "b": 5.0}
    assert "".join(order) == "abbaabba"


def test_a_spent_budget_ends_the_rounds_after_the_first_measured_one() -> None:
    calls = []
    common.interleave({"a": lambda: calls.append(1) or 1.0}, rounds=50, budget_s=0.0)
    assert len(calls) == 2  # warm-up and one round


def test_the_table_replaces_what_was_run_and_keeps_the_rest() -> None:
    text = "before\n<!-- benchmarks -->\n<!-- /benchmarks -->\nafter\n"
    row = {name: runner.table_row(json.loads(result(bench=name).to_json())) for name in ("ddp", "launch")}
    both = runner.with_table(text, {"launch": [row["launch"]], "ddp": [row["ddp"]]})
    assert both.splitlines()[4:6] == [row["ddp"], row["launch"]]
    faster = runner.table_row(json.loads(result(bench="ddp", value=1.0).to_json()))
    again = runner.with_table(both, {"ddp": [faster]})
    assert again == both.replace(row["ddp"], faster)


def test_a_readme_without_markers_is_an_error() -> None:
    with pytest.raises(SystemExit, match="has no table to rewrite"):
        runner.with_table("text", {})


@pytest.mark.parametrize("name", [path.stem for path in FOLDER.glob("[!_]*.py")])
def test_every_benchmark_says_what_it_measures_and_has_a_main(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    assert source.startswith('"""') and "\ndef main(argv: list[str] | None = None) -> int:" in source


FACTS = {
    "jaxpar": {"step_s": 0.1, "collectives": {"all_gather": 5}, "sent_bytes": 1 << 20, "device_bytes": 3 << 20},
    "kept": {"step_s": 0.3, "collectives": {"all_gather": 3}, "sent_bytes": 1 << 19, "device_bytes": 4 << 20},
    "by hand": {"step_s": 0.2, "collectives": {"all_gather": 10}, "sent_bytes": 1 << 20, "device_bytes": 2 << 20},
}  # fmt: skip


@pytest.fixture
def fsdp(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return load("fsdp")


def test_layouts_take_turns_and_every_number_is_the_median_of_its_runs(fsdp: ModuleType, monkeypatch) -> None:
    workers, order = sys.modules["_workers"], []
    times = iter([1.0, 10.0, 5.0, 30.0, 2.0, 20.0])

    def worker(script: str, *arguments: object, layout: str):
        order.append(layout)
        return {"jaxpar": {"step_s": next(times), "collectives": {"all_gather": 5}}}

    monkeypatch.setattr(workers, "run_worker", worker)
    medians = workers.medians_of_turns("worker.py", layouts=["a", "b"], repeats=3)
    assert order == ["a", "b"] * 3
    assert medians["a"] == {"jaxpar": {"step_s": 2.0, "collectives": {"all_gather": 5}}}
    assert medians["b"]["jaxpar"]["step_s"] == 20.0


def test_steps_of_both_ways_are_judged_by_the_hand_written_step(fsdp: ModuleType) -> None:
    default, kept, throughput = fsdp.step_results({"2 processes": FACTS})
    assert (default.ratio, default.ok, default.target) == (0.5, True, "ratio <= 1.05")
    assert (kept.ratio, kept.ok) == (
        pytest.approx(1.5),
        False,
    ) and "reshard_after_forward=False" in kept.config
    assert (throughput.value, throughput.unit, throughput.ratio) == (10240.0, "tokens/s", 2.0)


def test_programs_are_compared_in_collectives_bytes_and_memory(fsdp: ModuleType) -> None:
    rows = list(fsdp.program_results({name: FACTS[name] for name in ("jaxpar", "by hand")}))
    assert [(row.metric, row.value, row.baseline_value) for row in rows] == [
        ("collectives", 5, 10), ("sent", 1.0, 1.0), ("peak", 3.0, 2.0)
    ]  # fmt: skip
    assert "5 all_gather" in rows[0].unit and "10 all_gather" in rows[0].baseline
