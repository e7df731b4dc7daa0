"""The report of a failed job ends with how each rank ended: a row for each of a few, counts for many."""

import re

import pytest

from jaxpar_launch import launch
from jaxpar_launch._fates import MAX_ROWS, Fate, table


def fate(rank: int, ended: str = "stopped", **fields: object) -> Fate:
    return Fate(rank=rank, host="ab"[rank % 2], pid=100 + rank, ended=ended, **fields)  # pyright: ignore


def test_a_few_ranks_have_a_row_each_in_their_order() -> None:
    lines = table([fate(1, "exit code 3", is_failure=True), fate(2), fate(0)], first=1)
    assert [line.split() for line in lines] == [
        ["rank", "host", "pid", "ended"],
        ["0", "a", "100", "stopped"],
        ["1", "b", "101", "exit", "code", "3", "<-", "failed", "first"],
        ["2", "a", "102", "stopped"],
    ]
    assert (
        len({line.index(word) for line, word in zip(lines, ["ended", "stop", "exit", "stop"], strict=True)})
        == 1
    )


def test_of_many_only_those_that_failed_have_rows() -> None:
    failed = {5: "exit code 3", 9: "signal 6 (SIGABRT)"}
    fates = [fate(rank, failed.get(rank, "stopped"), is_failure=rank in failed) for rank in range(63)]
    lines = table([*fates, fate(63, "had finished")], first=9)
    assert [line.split()[0] for line in lines] == ["rank", "5", "9", "ranks", "rank"]
    assert lines[2].endswith("signal 6 (SIGABRT)  <- failed first")
    assert lines[3:] == ["ranks 0-4, 6-8, 10-62 (61): stopped", "rank 63 (1): had finished"]


def test_when_many_fail_the_first_is_among_the_rows() -> None:
    lines = table([fate(rank, "exit code 1", is_failure=True) for rank in range(64)], first=40)
    assert len(lines) == 1 + MAX_ROWS + 1
    assert sum(line.startswith("40 ") and line.endswith("<- failed first") for line in lines) == 1
    assert lines[-1] == "ranks 7-39, 41-63 (56): exit code 1"


def test_without_workers_there_is_no_table() -> None:
    assert table([], first=None) == []


def test_it_survives_the_wire() -> None:
    one = fate(1, tail=("x", "y"), is_failure=True)
    assert Fate.from_wire(one.to_wire() | {"tail": list(one.tail)}) == one


@pytest.mark.parametrize("nproc", [3, 20])
def test_the_report_of_few_and_of_many(nproc: int) -> None:
    source = 'case $RANK in 0) exit 0;; 1) sleep 0.5; echo "no space left" >&2; exit 7;; *) sleep 60;; esac'
    result = launch(["sh", "-c", source], kind="program", nproc=nproc, timeout_s=30)
    assert result.exit_code == 7
    _, _, rows = result.report.partition("  rank  host")
    assert re.search(r"^  1 .* exit code 7; its last line: no space left  <- failed first$", rows, re.M)
    if nproc == 3:
        assert re.search(r"^  0 .* had finished: exit code 0$", rows, re.M)
        assert re.search(r"^  2 .* stopped by the launcher: signal 15 \(SIGTERM\)$", rows, re.M)
    else:
        assert (
            "  rank 0 (1): had finished: exit code 0\n  ranks 2-19 (18): stopped by the launcher: signal 15 (SIGTERM)"
            in rows
        )
        assert len(result.report.splitlines()) < 12
