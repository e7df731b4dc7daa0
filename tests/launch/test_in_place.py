"""`--recover in-place`, the launcher's half: who is replaced, when all start again instead, what is counted.

The workers are plain Python and keep to the protocol of the store by hand, so that each case takes no time.
"""

import json
import os
import re
from pathlib import Path

import pytest

from jaxpar_launch import LaunchSpecError, launch
from jaxpar_launch._rdzv_spec import RendezvousSpec
from jaxpar_launch._spec import LaunchSpec

ROOT = Path(__file__).parents[2]  # where jaxpar is, which has the coordination services
WORKER = """
import os, signal, sys, time
from jaxpar_launch.store import StoreClient

mode, rank, world = sys.argv[1], int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
store = StoreClient(os.environ["JAXPAR_STORE"], token=os.environ["JAXPAR_STORE_TOKEN"], timeout_s=20)

def join():
    print("world", world, "pid", os.getpid(), "at", os.environ["JAXPAR_RECOVERY"], flush=True)
    key = "nothing" if mode == "did not opt in" else "recovery"
    store.set(f"{key}/{world}/joined/{rank}", True)
    store.wait([f"{key}/{world}/joined/{other}" for other in range(2)], 20)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

join()
if world == 0:
    if mode == "had come to the end":
        store.set("recovery/over", True)
    if rank == 1:
        die()
    word = store.get("recovery/1/word", 20)
    print("hears of", word["coordinator"], "and", word["pids"], flush=True)
    if mode == "was stuck":
        time.sleep(20)
    if mode == "was lost too":
        die()
    world = 1
    store.set(f"recovery/1/came/{rank}", True)
    join()
if world == 1 and mode == "loses one more":
    die() if rank == 1 else time.sleep(20)
"""


def run(script, mode: str, *, is_shown: bool = False):
    return launch(
        [script(WORKER), mode],
        nproc=2,
        max_restarts=1,
        recover="in-place",
        recover_timeout_s=0.5,
        timeout_s=30,
        is_shown=is_shown,
    )


def worlds(output: str) -> list[tuple[int, int, str]]:
    """World, pid and coordinator, for each world that a rank was in."""
    return [(int(w), int(pid), at) for w, pid, at in re.findall(r"world (\d+) pid (\d+) at (\S+)", output)]


def test_a_lost_worker_is_replaced_and_the_other_keeps_its_process(script) -> None:
    result = run(script, "goes on").check()
    (stayed, stayed_still), (lost, newcomer) = map(worlds, result.output)
    assert (stayed[0], stayed_still[0], newcomer[0]) == (0, 1, 1)
    assert stayed[1] == stayed_still[1]
    assert lost[1] != newcomer[1]
    assert lost[2] == stayed[2] != newcomer[2]  # each world has a coordinator of its own
    assert f"hears of {newcomer[2]} and [{stayed[1]}]" in result.output[0]


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("was stuck", "rank 0 did not leave the old world within 0.5 s"),
        ("was lost too", "before its world was complete"),
        ("did not opt in", "rank 0 not in run_recoverable"),
        ("had come to the end", "others have come to their end"),
    ],
)
def test_all_start_again_if_the_other(mode: str, why: str, script, capfd) -> None:
    # One restart is allowed: a recovery that came to nothing is no second one.
    result = run(script, mode, is_shown=True).check()
    assert re.search(
        rf"rank \d failed .*; not in place: {why}; all workers start again, restart 1 of 1",
        capfd.readouterr().err,
    )
    for output in result.output:
        first, *_, last = worlds(output)
        assert (first[0], last[0]) == (0, 1)
        assert first[1] != last[1]


def test_recoveries_are_restarts_and_are_told(script) -> None:
    result = run(script, "loses one more")
    assert result.exit_code == 137
    assert result.report.splitlines()[-2:] == [
        "  before that:",
        "  - rank 1 failed (signal 9 (SIGKILL)); replaced in place, restart 1 of 1",
    ]


def test_the_command_says_what_it_does(script, command) -> None:
    command.environ["PYTHONPATH"] += os.pathsep + str(ROOT)
    line = ["--recover", "in-place", "--recover-timeout", 5, "--max-restarts", 1, "--nproc-per-node", 2]
    result = command(*line, script(WORKER), "goes on")
    assert result.returncode == 0, result.stderr
    assert (
        result.stderr
        == "jaxpar-launch: rank 1 failed (signal 9 (SIGKILL)); replaced in place, the others go on\n"
    )


MEETING = RendezvousSpec(least=2, most=2, endpoint="127.0.0.1:29400", backend="tcp")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"recover": "maybe"}, "--recover 'maybe' must be one of restart, in-place"),
        ({"recover_timeout_s": 0.0}, "--recover-timeout 0 must be a number of seconds, at least 0.1"),
        (
            {"rendezvous": MEETING},
            "replaces workers of one host; this job is spread over several. Write --recover restart",
        ),
        ({"platform": "gpu"}, "proved for workers on the CPU only.* Write --recover restart"),
        ({"max_restarts": 0}, "--max-restarts 0 allows none. Write --max-restarts 3"),
    ],
)
def test_what_is_not_proved_is_refused(wrong: dict, said: str) -> None:
    with pytest.raises(LaunchSpecError, match=said):
        LaunchSpec(
            **({"command": ("true",), "kind": "program", "recover": "in-place", "max_restarts": 1} | wrong)
        )


def test_the_events_of_a_recovery(script, command) -> None:
    command.environ["PYTHONPATH"] += os.pathsep + str(ROOT)
    line = ["--recover", "in-place", "--max-restarts", 1, "--nproc-per-node", 2, "--log-dir", "logs"]
    result = command(*line, script(WORKER), "goes on")
    assert result.returncode == 0, result.stderr
    (path,) = (command.folder / "logs").glob("*/events.jsonl")
    events = [json.loads(text) for text in path.read_text().splitlines()]
    told = [event["event"] for event in events]
    begin = ["launched", "rendezvous", "worker_started", "worker_started"]
    assert told[:7] == [*begin, "worker_ended", "worker_started", "replaced"]
    assert [(event["round"], event["restarts"]) for event in events] == [(0, 0)] * 5 + [(1, 1)] * 5
    assert events[4]["signal"] == "SIGKILL" and events[4]["rank"] == events[5]["rank"] == 1
    assert events[6]["text"] == "rank 1 failed (signal 9 (SIGKILL))"
