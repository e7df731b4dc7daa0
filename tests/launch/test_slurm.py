"""Under srun the launcher knows its nodes; what is incomplete or contradicts itself is named, not guessed."""

import json

import pytest

from jaxpar_launch import LaunchSpecError
from jaxpar_launch._slurm import expand_nodes, slurm_meeting

STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,3-4,007]x,m", ["n1x", "n3x", "n4x", "n007x", "m"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
    ],
)
def test_lists_of_nodes(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "a,", "n[", "n[1-", "n[2-1]", "n[a]", "n]1[", "n[1[2]]"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(LaunchSpecError, match="is no list of nodes as"):
        expand_nodes(text)


@pytest.mark.parametrize("name", STEP)
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(
        LaunchSpecError, match=f"no complete step of a Slurm job: {name} missing. Start it with srun"
    ):
        slurm_meeting({key: value for key, value in STEP.items() if key != name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"SLURM_STEP_NODELIST": "n[1-3]"},
            "contradicts itself: SLURM_STEP_NODELIST=n.1-3. names 3 nodes, with SLURM_STEP_NUM_NODES=2",
        ),
        ({"SLURM_NODEID": "2"}, "and SLURM_NODEID=2"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "Slurm runs 8 launchers on 2 nodes"),
        ({"SLURM_NODEID": "one"}, "SLURM_NODEID='one' is no number"),
    ],
)
def test_what_contradicts_itself_is_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchSpecError, match=message):
        slurm_meeting(STEP | change)


def test_two_launchers_of_a_step_meet_without_an_option(script, command) -> None:
    worker = script(
        "import json, os; print(json.dumps([os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'GROUP_RANK')]))"
    )
    launchers = []
    for node in (1, 0):
        command.environ |= STEP | {"SLURM_STEP_NODELIST": "127.0.0.[1-2]", "SLURM_NODEID": str(node)}
        launchers.append(command.start("--nproc-per-node", 2, worker))
    found = [(*launcher.communicate(timeout=30), launcher.returncode) for launcher in launchers]
    assert [code for *_, code in found] == [0, 0], found
    for node, (stdout, _, _) in zip((1, 0), found, strict=True):
        lines = sorted(line[line.index('["') :] for line in stdout.splitlines())
        assert [json.loads(line) for line in lines] == [[str(2 * node + i), "4", str(node)] for i in range(2)]


def test_a_batch_script_of_several_nodes_is_one_host(script, command) -> None:
    command.environ |= {"SLURM_JOB_ID": "41", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0"}
    assert command(script("import os; print(os.environ['WORLD_SIZE'])")).stdout == "1\n"


def test_slurm_and_places_by_hand_exclude_each_other(command) -> None:
    command.environ |= STEP
    result = command("--rdzv-backend", "slurm", "--nnodes", 2, "--no-python", "true")
    assert result.returncode == 2
    assert "--rdzv-backend slurm takes --nnodes from Slurm" in result.stderr
