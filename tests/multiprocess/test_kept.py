"""A restart compiles nothing, on any rank; another shape, a damaged file, and nothing else, is compiled again."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxpar_launch import launch

WORKER = Path(__file__).parent / "workers" / "kept.py"


def run(folder: Path, *arguments: object, nproc: int = 2, **options: int) -> tuple[list[list[Any]], str]:
    """What each rank reported in each attempt, and all that was said."""
    result = launch(
        [WORKER, *map(str, arguments)],
        nproc=nproc,
        devices_per_proc=2 // nproc,
        environ={"JAXPAR_COMPILATION_CACHE_DIR": str(folder)},
        timeout_s=120,
        **options,
    ).check()
    reports = [
        [json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in result.output
    ]
    return reports, "\n".join(result.output)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    """A folder of two processes' programs, and what they reported: rank 1 was killed once, and all started again."""
    folder = tmp_path_factory.mktemp("programs")
    return folder, run(folder, 8, "fsdp,pipeline", "die", max_restarts=1)[0]


def test_a_restart_compiles_nothing_and_changes_no_bit(kept) -> None:
    for first, again in kept[1]:
        assert "jit(train_step)" in first["compiled"] and first["loaded"] == []
        assert again["compiled"] == []
        assert sorted(again["loaded"]) == sorted(first["compiled"])
        assert again["losses"] == first["losses"]


def test_what_is_damaged_or_of_another_shape_is_compiled(kept) -> None:
    folder, reports = kept
    (damaged,) = (folder / "rank-1").glob("jit_train_step-*")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    ([other, other_longer], [hurt, hurt_longer]), said = run(folder, "8,12", "fsdp")
    assert (other["compiled"], hurt["compiled"]) == ([], ["jit(train_step)"])
    assert other["losses"]["fsdp"] == hurt["losses"]["fsdp"] == reports[1][0]["losses"]["fsdp"]
    assert said.count(f"{damaged} is damaged, and was removed; the program is compiled") == 1
    for longer, [first, _] in zip((other_longer, hurt_longer), reports, strict=True):
        assert "jit(train_step)" in longer["compiled"]
        assert set(longer["loaded"]) < set(first["compiled"])


def test_one_process_never_loads_what_two_have_kept(kept) -> None:
    ([alone],), _ = run(kept[0], 8, "pipeline", nproc=1)
    assert alone["loaded"] == []
    ([again],), _ = run(kept[0], 8, "pipeline", nproc=1)
    assert again["compiled"] == []
    assert again["losses"] == alone["losses"]
