"""What Slurm says of a job step with one launcher on each node: how many nodes, which of them this is, where they meet.

    srun --ntasks-per-node=1 jaxpar-launch --nproc-per-node 4 train.py

    SLURM_STEP_NODELIST  gpu[001-003],big7   ->  gpu001 gpu002 gpu003 big7; they meet at the first
    SLURM_JOB_ID                             ->  the name of the job, and a port of its own

Only a complete description counts. One that lacks something, or contradicts itself, is an error that names it: a launcher that
guesses would wait for others that never come, or train alone.
"""

import itertools
import re
from collections.abc import Mapping

from jaxpar_launch._errors import LaunchSpecError

_NEEDED = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NODEID",
)
_LINE = "srun --ntasks-per-node=1 jaxpar-launch ..."
_FIRST_PORT, _NUM_PORTS = 20_000, 20_000
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def is_step_of_several_nodes(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process, as one of several on several nodes."""
    return environ.get("SLURM_STEP_NUM_NODES", "1") != "1" and environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def slurm_meeting(environ: Mapping[str, str]) -> dict[str, str]:
    """nnodes, node_rank, rdzv_endpoint and rdzv_id of this job step.

    Args:
        environ: the launcher's environment.

    Raises:
        LaunchSpecError: something is missing, or does not fit.

    Example:
        >>> slurm_meeting({"SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NODEID": "1",
        ...                "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"})
        {'nnodes': '2', 'node_rank': '1', 'rdzv_endpoint': 'n1:20041', 'rdzv_id': 'slurm-41.0'}
    """
    if missing := [name for name in _NEEDED if not environ.get(name)]:
        raise LaunchSpecError(
            f"this is no complete step of a Slurm job: {', '.join(missing)} missing. Start it with {_LINE}, one launcher on each "
            "node; on one node alone, write --standalone."
        )
    nodes = expand_nodes(environ["SLURM_STEP_NODELIST"])
    num_nodes, num_tasks, node_id = (
        _number(environ, name) for name in ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID")
    )
    if len(nodes) != num_nodes or not 0 <= node_id < num_nodes:
        raise LaunchSpecError(
            f"Slurm contradicts itself: SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} names {len(nodes)} nodes, with "
            f"SLURM_STEP_NUM_NODES={num_nodes} and SLURM_NODEID={node_id}. Variables of an outer job may have been passed on: "
            "unset them, or give --nnodes and --rdzv-endpoint."
        )
    if num_tasks != num_nodes:
        raise LaunchSpecError(
            f"Slurm runs {num_tasks} launchers on {num_nodes} nodes, and each starts all workers of its node: write {_LINE}. To let "
            "Slurm start the workers themselves, leave jaxpar-launch out: jaxpar.init_process_group() knows Slurm."
        )
    job = environ["SLURM_JOB_ID"]
    port = _FIRST_PORT + _number(environ, "SLURM_JOB_ID") % _NUM_PORTS
    return {
        "nnodes": str(num_nodes),
        "node_rank": str(node_id),
        "rdzv_endpoint": f"{nodes[0]}:{port}",
        "rdzv_id": f"slurm-{job}.{environ['SLURM_STEP_ID']}",
    }


def expand_nodes(text: str) -> list[str]:
    """The nodes that a Slurm list names, in its order.

    Raises:
        LaunchSpecError: it is no such list.

    Example:
        >>> expand_nodes("gpu[001-002,7],big,r[1-2]n[3-4]")
        ['gpu001', 'gpu002', 'gpu7', 'big', 'r1n3', 'r1n4', 'r2n3', 'r2n4']
    """
    parts = re.split(r",(?![^\[]*\])", text)
    nodes = [node for part in parts for node in _expanded(part, text)]
    if not all(nodes) or any(set(node) & set("[],") for node in nodes):
        raise _unreadable(text)
    return nodes


def _expanded(part: str, text: str) -> list[str]:
    """One name, all its brackets written out."""
    pieces = _BRACKETS.split(part)  # every second one stood in brackets
    choices = [_range(piece, text) if i % 2 else [piece] for i, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _range(piece: str, text: str) -> list[str]:
    """ "001-003,7" as its numbers, with their leading zeros."""
    found = []
    for some in piece.split(","):
        first, dash, last = some.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
            raise _unreadable(text)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _unreadable(text: str) -> LaunchSpecError:
    return LaunchSpecError(
        f"SLURM_STEP_NODELIST={text!r} is no list of nodes as gpu[001-003],big7. Give --nnodes, --node-rank and --rdzv-endpoint."
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise LaunchSpecError(f"{name}={environ[name]!r} is no number; Slurm sets it. Start with {_LINE}.")
    return int(environ[name])
