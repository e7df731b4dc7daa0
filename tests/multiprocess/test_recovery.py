"""A worker is killed, the others keep their processes and train on; the losses are those of a run without the loss."""

import re
import sys
from pathlib import Path

import numpy as np

from jaxpar_launch import LaunchResult, launch

WORKERS = Path(__file__).parent / "workers"
sys.path.insert(0, str(WORKERS))
import recovery_model as model  # noqa: E402


def run(nproc: int, *losses: str, recover_timeout_s: float = 20.0) -> LaunchResult:
    return launch(
        [WORKERS / "recovery.py", *losses],
        nproc=nproc,
        max_restarts=len(losses) // 2,  # a folder may follow
        recover="in-place",
        recover_timeout_s=recover_timeout_s,
        timeout_s=120,
    ).check()


def worlds(output: str) -> list[tuple[int, int]]:
    return [(int(world), int(pid)) for world, pid in re.findall(r"^world (\d+) pid (\d+)", output, re.M)]


def steps(output: str) -> list[tuple[int, float]]:
    return [(int(i), float.fromhex(loss)) for i, loss in re.findall(r"^step (\d+) (\S+)$", output, re.M)]


def check_losses(result: LaunchResult, expected_steps: list[int]) -> None:
    """Right, the same on all ranks, and bit for bit the same where a step is done again."""
    expected = model.expected_losses()
    for output in result.output:
        assert [i for i, _ in steps(output)] == expected_steps
        assert steps(output) == steps(result.output[0])
    for i, loss in steps(result.output[0]):
        np.testing.assert_allclose(loss, expected[i], rtol=1e-5)
    assert len(set(steps(result.output[0]))) == model.NUM_STEPS
    assert len({re.findall(r"^weights (\w+)", output, re.M)[0] for output in result.output}) == 1


def test_a_sharded_model_comes_back_from_its_checkpoint(tmp_path: Path) -> None:
    result = run(2, "1", "in a step", str(tmp_path))
    (stayed, stayed_still), (lost, newcomer) = map(worlds, result.output)
    assert stayed[1] == stayed_still[1]
    assert lost[1] != newcomer[1]
    check_losses(result, [0, 1, 2, 3, 4, 4, 5, 6, 7])


def test_rank_0_is_lost_in_a_step_and_then_rank_1_between_steps() -> None:
    result = run(3, "0", "in a step", "1", "between steps")
    pids = [[pid for _, pid in worlds(output)] for output in result.output]
    assert [[world for world, _ in worlds(output)] for output in result.output] == [[0, 1, 2]] * 3
    assert [len(set(of_rank)) for of_rank in pids] == [2, 2, 1]
    assert pids[0][1] == pids[0][2]  # who came as a replacement survives the next loss
    assert pids[1][0] == pids[1][1]
    check_losses(result, [0, 1, 2, 3, 4, 4, 5, 6, 6, 7])
    # The old backends are gone, sockets and all, or the files of a survivor would grow from world to world.
    assert (
        len({files for output in result.output for files in re.findall(r" files (\d+)$", output, re.M)}) == 1
    )


def test_a_survivor_that_is_stuck_makes_all_start_again() -> None:
    result = run(2, "1", "while stuck", recover_timeout_s=1.0)
    for output in result.output:
        (_, pid), (world, pid_after) = worlds(output)
        assert world == 1
        assert pid != pid_after
    check_losses(result, [0, 1, 2, 3, 4, *range(model.NUM_STEPS)])
