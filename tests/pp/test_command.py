"""`python -m jaxpar.pp`: what it prints and saves, and how it refuses mistakes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.pp import (
    Costs,
    Schedule,
    add_communication,
    auto_schedule,
    get_schedule,
    schedule_names,
    simulate,
)
from jaxpar.pp._schedule._command import main

ZBV = ["schedule", "--name", "ZBV", "--ranks", "2", "--microbatches", "4"]


def test_schedule_prints_the_grid_and_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ZBV) == 0
    schedule = get_schedule("ZBV", 2, 4)
    assert capsys.readouterr().out == f"{schedule}\n\n{simulate(schedule)}\n"


def test_costs_and_lockstep_change_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["schedule", "--name", "1F1B", "--ranks", "2", "--microbatches", "2", "--costs", "I=2"]
    assert main(one) == 0
    assert "makespan 12," in capsys.readouterr().out
    assert main([*one, "--lockstep"]) == 0
    assert "makespan 14," in capsys.readouterr().out


def test_stages_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--ranks", "2", "--microbatches", "2", "--stages-per-rank", "3"]
    assert main(["schedule", "--name", "LoopedBFS", *args]) == 0
    assert "5F0" in capsys.readouterr().out


def test_files_are_written_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv, svg, trace = tmp_path / "a.csv", tmp_path / "a.svg", tmp_path / "a.json"
    assert main([*ZBV, "--csv", str(csv), "--svg", str(svg), "--trace", str(trace)]) == 0
    first = capsys.readouterr().out
    assert Schedule.from_csv(csv).rows == get_schedule("ZBV", 2, 4).rows
    assert "<svg" in svg.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert main(["schedule", "--from-csv", str(csv)]) == 0
    assert capsys.readouterr().out == first


def test_communication_is_spelled_out_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv = tmp_path / "lowered.csv"
    assert main([*ZBV, "--communication", "--csv", str(csv)]) == 0
    assert Schedule.from_csv(csv).rows == add_communication(get_schedule("ZBV", 2, 4)).rows
    assert main(["schedule", "--from-csv", str(csv), "--communication"]) == 0
    assert "0SEND_F0" in capsys.readouterr().out


def test_compare_lists_all_trainable_schedules_the_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--ranks", "4", "--microbatches", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["schedule", "stages/rank", "makespan", "bubble", "peak", "memory"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert rows.keys() == set(schedule_names()) - {"ForwardOnly"}
    makespans = [float(row[1]) for row in rows.values()]
    assert makespans == sorted(makespans)
    assert rows["1F1B"] == ["1", "33", "27.3%", "4"]
    assert rows["Interleaved1F1B"] == ["2", "28.5", "15.8%", "5.5"]  # 57 and 11, each of half a share


def test_compare_within_a_memory_limit_lists_what_fits_and_searches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["compare", "--ranks", "3", "--microbatches", "6", "--memory-limit", "3"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert {row[0] for row in rows} == {
        "auto_schedule",
        "1F1B",
        "ZBH1",
        "ZBVZeroBubble",
        "InterleavedZeroBubble",
    }
    assert all(float(row[4]) <= 3 for row in rows)
    for v in ("1", "2"):
        makespans = {row[0]: float(row[2]) for row in rows if row[1] == v}
        assert makespans["auto_schedule"] == min(makespans.values())


def test_the_search_is_a_schedule_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv = tmp_path / "found.csv"
    args = ["--ranks", "3", "--microbatches", "5", "--costs", "I=1.5,W=0.5", "--memory-limit", "2"]
    assert main(["schedule", "--name", "auto", *args, "--csv", str(csv)]) == 0
    wanted = auto_schedule(3, 5, Costs(I=1.5, W=0.5), 2)
    assert Schedule.from_csv(csv).rows == wanted.rows
    assert f"makespan {simulate(wanted, Costs(I=1.5, W=0.5)).makespan:g}," in capsys.readouterr().out


def test_compare_names_what_is_not_defined(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--ranks", "4", "--microbatches", "6"]) == 0
    assert "not defined for these numbers: DualPipeV" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["schedule", "--name", "ZBX", "--ranks", "2", "--microbatches", "4"], "no schedule is called 'ZBX'"),
        (
            ["schedule", "--name", "ZBV", "--ranks", "0", "--microbatches", "4"],
            "n_ranks=0 must be at least 1",
        ),
        (["schedule", "--name", "ZBV"], "give --name, --ranks and --microbatches"),
        (["schedule"], "The names are GPipe, 1F1B"),
        (["schedule", "--from-csv", "a.csv", "--ranks", "2"], "--from-csv reads everything from the file"),
        (["schedule", "--from-csv", "missing.csv"], "No such file or directory: 'missing.csv'"),
        ([*ZBV, "--memory-limit", "4"], "write --name auto, or compare all schedules"),
        (["compare", "--ranks", "2", "--microbatches", "4", "--memory-limit", "0.5"], "memory_limit is 0.5"),
        ([*ZBV, "--costs", "G=1"], "'G=1' in 'G=1': the names are F, I, W"),
        ([*ZBV, "--svg", "a.gif"], "Pictures end in .svg"),
        (["compare", "--ranks", "0", "--microbatches", "4"], "n_ranks=0 must be at least 1"),
    ],
)
def test_mistakes_exit_2_and_say_what_to_write(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("python -m jaxpar.pp: ")
    assert message in error


def test_an_unlawful_file_is_shown_with_its_cell_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0B0,0F0\n")
    assert main(["schedule", "--from-csv", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "law 'order' broken at rank 0, step 0" in captured.err and "^^^" in captured.err


@pytest.mark.parametrize("args", [["--help"], ["schedule", "--help"], ["compare", "--help"]])
def test_help_teaches(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(args)
    text = capsys.readouterr().out
    assert "python -m jaxpar.pp" in text
    assert ("examples:" in text) == (args == ["--help"])


def test_the_module_runs_as_a_program_and_exits_2_without_a_traceback() -> None:
    command = [sys.executable, "-m", "jaxpar.pp", "schedule", "--name", "1F1B", "--ranks", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "invalid int value: 'x'" in done.stderr and "Traceback" not in done.stderr
