"""A job that is killed again and again, or whose hosts come and go: does it end with what one undisturbed process computes?

    kills     SIGKILL of a worker or of the launcher at random moments, while checkpoints are written too; the job goes on
    worlds    hosts 4 -> 2 -> 3 -> 4 of `--nnodes 1:4` while it trains

Each job trains a model with FSDP on a data set for four epochs and saves every second step. In the end every sample must have been
seen exactly once in each epoch, and every loss must be that of an undisturbed process; the script fails if not. `--quick`: 4 kills.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _common import Result, emit, is_quick
from _survive_job import NUM_STEPS, WORKER, Trace, trace

LIMIT_S = 120.0  # of everything that is waited for
RTOL = 1e-5  # sums over another number of devices round differently


def main(argv: list[str] | None = None) -> int:
    """Runs both; one line per result."""
    num_kills = 4 if is_quick(argv, __doc__) else 50
    with tempfile.TemporaryDirectory() as scratch:
        reference = undisturbed(Path(scratch) / "reference").losses
        results = kills(Path(scratch), reference, num_kills)
        results += worlds(Path(scratch) / "worlds", reference)
    return emit(*results)


@dataclass
class Launchers:
    """The launchers of a job; those that run are killed at the end."""

    folder: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *options: object, pause_s: float) -> subprocess.Popen[bytes]:
        """One more launcher of the job."""
        command = [
            sys.executable,
            "-m",
            "jaxpar_launch",
            *map(str, options),
            str(WORKER),
            str(self.folder),
            str(pause_s),
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | {"JAX_PLATFORMS": "cpu"}
            )
        self.running.append(process)
        return process

    def __enter__(self) -> "Launchers":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.running:
            process.kill()  # its workers end with it
            process.wait()


def undisturbed(folder: Path) -> Trace:
    """One process from beginning to end."""
    with Launchers(folder) as launchers:
        if launchers.start(pause_s=0).wait(LIMIT_S) != 0:
            raise RuntimeError(said(folder))
    return trace(folder)


@dataclass
class Tally:
    """What was killed so far."""

    wanted: int
    done: int = 0
    while_saving: int = 0
    lost_s: list[float] = field(default_factory=list)


def kills(scratch: Path, reference: dict[int, float], num_kills: int) -> list[Result]:
    """Kills until so many are done, in as many jobs as that takes, each of which must end well."""
    chance, tally, again, number = random.Random(0), Tally(num_kills), 0, 0
    while tally.done < num_kills:
        folder = scratch / f"kills-{number}"
        number += 1
        killed_job(folder, chance, tally)
        found = trace(folder)
        again += found.num_lines - NUM_STEPS
        if faults := found.faults(rtol=RTOL, reference=reference):
            raise RuntimeError(f"after {tally.done} kills: {faults}\n{said(folder)}")
        print(f"{tally.done} kills, {number} jobs ended well", file=sys.stderr, flush=True)
    config, lost_s = f"2 processes, {tally.done} kills at random moments", sorted(tally.lost_s)
    return [
        Result(
            "survive",
            config,
            "jobs that ended with every sample once and the losses of one process",
            number,
            "jobs",
        ),
        Result("survive", config, "kills while a checkpoint was being written", tally.while_saving, "kills"),
        Result("survive", config, "steps done again", again / tally.done, "steps per kill"),
        Result(
            "survive", config, "SIGKILL of a worker to the next step noted", lost_s[len(lost_s) // 2], "s"
        ),
    ]


def killed_job(folder: Path, chance: random.Random, tally: Tally) -> None:
    """A job to its end; a launcher that is killed is started again."""
    with Launchers(folder) as launchers:
        code: int | None = None
        while code != 0:
            launcher = launchers.start("--nproc-per-node", 2, "--max-restarts", 1000, pause_s=0.05)
            while tally.done < tally.wanted and is_at_work(launcher, folder):
                time.sleep(chance.uniform(0, 0.6))
                victim = (
                    launcher.pid if chance.random() < 0.2 else chance.choice(children(launcher.pid) or [0])
                )
                if launcher.poll() is not None or not victim:
                    break
                tally.while_saving += any((folder / "checkpoints").glob("*.orbax-checkpoint-tmp*"))
                before = newest(folder)
                os.kill(victim, signal.SIGKILL)
                killed_s, tally.done = time.monotonic(), tally.done + 1
                if victim != launcher.pid and happens(lambda: newest(folder), since=before):
                    tally.lost_s.append(time.monotonic() - killed_s)
            code = launcher.wait(LIMIT_S)
            if code not in (0, -signal.SIGKILL):
                raise RuntimeError(f"exit code {code}\n{said(folder)}")


def worlds(folder: Path, reference: dict[int, float]) -> list[Result]:
    """Hosts leave and join while the job trains."""
    options = (
        "--nnodes",
        "1:4",
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
        "--rdzv-conf",
        "last_call_timeout=2",
    )
    begin_s = time.monotonic()
    with Launchers(folder) as launchers:
        hosts = [launchers.start(*options, pause_s=0.4)]
        time.sleep(1)  # the first one serves the meeting, and stays
        hosts += [launchers.start(*options, pause_s=0.4) for _ in range(3)]
        wait_for(folder, world=4)
        for host in hosts[2:]:
            host.send_signal(signal.SIGTERM)
        wait_for(folder, world=2)
        hosts[2] = launchers.start(*options, pause_s=0.4)
        wait_for(folder, world=3)
        hosts[3] = launchers.start(*options, pause_s=0.4)
        codes = [host.wait(LIMIT_S) for host in hosts]
    found = trace(folder)
    faults = found.faults(rtol=RTOL, reference=reference)
    if changes(found) != [4, 2, 3, 4] or any(codes) or faults:
        raise RuntimeError(f"{changes(found)} {codes} {faults}\n{said(folder)}")
    config = "hosts 4 -> 2 -> 3 -> 4"
    return [
        Result("survive", config, "whole job", time.monotonic() - begin_s, "s"),
        Result("survive", config, "steps done again", found.num_lines - NUM_STEPS, "steps"),
    ]


def said(folder: Path) -> str:
    """The end of what launchers and workers printed."""
    return (folder / "output.txt").read_text()[-3000:]


def changes(found: Trace) -> list[int]:
    """Numbers of processes one after the other."""
    order = [found.worlds[step] for step in sorted(found.worlds)]
    return [world for i, world in enumerate(order) if i == 0 or order[i - 1] != world]


def is_at_work(launcher: subprocess.Popen[bytes], folder: Path) -> bool:
    """Waits for the next step; whether the job is still under way."""
    happens(lambda: launcher.poll() is not None or newest(folder), since=newest(folder))
    return launcher.poll() is None


def wait_for(folder: Path, *, world: int) -> None:
    """Until two steps were done in a world of this size."""
    if not happens(lambda: sum(size == world for size in trace(folder).worlds.values()) >= 2):
        raise RuntimeError(f"no step with {world} processes\n{said(folder)}")


def happens(what: Callable[[], object], since: object = None) -> bool:
    """Waits until a value differs from what it was; False at the deadline."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        now = what()
        if now and now != since:
            return True
        time.sleep(0.02)
    return False


def newest(folder: Path) -> Sequence[int]:
    """The newest attempt that has done a step, and its last step."""
    found = [
        (int(path.name.split("-")[0]), text)
        for path in (folder / "log").glob("*-0.jsonl")
        if (text := path.read_text())
    ]
    if not found:
        return ()
    attempt, text = max(found)
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return (attempt, json.loads(lines[-1])["step"]) if lines else ()


def children(pid: int) -> list[int]:
    """Processes that a process started itself."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


if __name__ == "__main__":
    raise SystemExit(main())
