"""The agent: one per host; runs a job as rounds of workers, each to its end, until one goes well or none may follow.

    LaunchSpec -> folder + guard + signals -> rounds of one host, or of several that meet
                  next_round -> workers -> Group.run -> a rank failed, 3 restarts are left
                  next_round -> workers -> Group.run -> all well

JAX cannot take a lost process back, so a failure ends all workers of a round, and all start again; or, with `--recover in-place`,
the others leave JAX and return with a replacement (`_in_place.py`). Everything that outlives a
round (guard, folder, signals) is held here; ports and stores by what gives the rounds (`_alone.py`, `_together.py`).
"""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar_launch._alone import Alone
from jaxpar_launch._devices import num_cores
from jaxpar_launch._errors import LaunchSpecError, RendezvousError
from jaxpar_launch._events import Events
from jaxpar_launch._files import RunFolder
from jaxpar_launch._group import Group
from jaxpar_launch._logs import MemorySink
from jaxpar_launch._outcome import Outcome
from jaxpar_launch._reaper import Reaper
from jaxpar_launch._round import Round
from jaxpar_launch._signals import ENDING, SignalInbox
from jaxpar_launch._spec import LaunchSpec
from jaxpar_launch._worker import Console, Worker
from jaxpar_launch.env import WorkerEnv, inherited_environ, join_address, thread_defaults

if TYPE_CHECKING:
    from jaxpar_launch._together import Together

_SHOW_CURSOR = b"\x1b[?25h"


def run_agent(
    spec: LaunchSpec,
    *,
    timeout_s: float | None = None,
    is_shown: bool = True,
    memories: tuple[MemorySink, ...] = (),
    values: dict[int, bytes] | None = None,
    secret: str | None = None,
) -> Outcome:
    """Runs the job to its end and leaves nothing behind: no process, port, or temporary file.

    Args:
        spec: what to run.
        timeout_s: kill everything after so many seconds; None waits as long as it takes.
        is_shown: whether the workers' output goes to this process's stdout and stderr.
        memories: one per worker to collect its output in, or none.
        values: filled with what each worker of the last round returned, pickled, by rank (`_called.py`).
        secret: the token by which launchers of several hosts know each other.

    Raises:
        RendezvousError: the hosts did not come together, or one was lost that served the others.
        LaunchSpecError: the port is in use, or the program cannot be run; no worker is left.
    """
    with contextlib.ExitStack() as stack:
        folder = RunFolder.make(log_dir=spec.log_dir, run_id=spec.run_id, is_kept=spec.has_logs)
        stack.callback(folder.close)
        host = socket.gethostname()
        events = stack.enter_context(_events(folder.path if spec.has_logs else None, host))
        job = _Job(
            spec=spec,
            inbox=stack.enter_context(SignalInbox(lambda signum: _note_signal(events, signum))),
            folder=folder,
            reaper=stack.enter_context(contextlib.closing(Reaper())),
            console=Console(host, is_shown=is_shown, memories=memories),
            deadline=None if timeout_s is None else time.monotonic() + timeout_s,
            values={} if values is None else values,
            events=events,
            workers=[],
        )
        events.note("launched", pid=os.getpid(), nproc=spec.nproc, run_id=spec.run_id)
        if spec.health_check_port is not None:
            from jaxpar_launch._health import Health, HealthServer  # most jobs start faster without

            health = Health(events, job.inbox, job.workers)
            stack.enter_context(contextlib.closing(HealthServer(spec.health_check_port, health)))
        rounds = stack.enter_context(contextlib.closing(_rounds(job, secret)))
        while True:
            if spec.rendezvous is not None:
                events.note("gathering")
            with rounds.next_round() as round_:
                outcome = _run_round(job, round_, rounds)
            outcome, why = rounds.conclude(outcome)
            if outcome.hang and spec.has_logs:
                folder.keep(f"attempt_{round_.number}/hang.txt", outcome.report)
            if why is None:
                if outcome.exit_code and spec.has_logs:
                    folder.keep("report.txt", outcome.report)
                break
            events.note("restart", text=why)
            if is_shown:
                said = [outcome.report] if outcome.hang else []
                print(*said, f"jaxpar-launch: {why}", sep="\n", file=sys.stderr, flush=True)
        if is_shown and outcome.exit_code and os.isatty(1):
            os.write(1, _SHOW_CURSOR)  # rank 0's progress bar hid it, and may not have lived to bring it back
        events.note("ended", exit_code=outcome.exit_code, text=outcome.head.partition("\n")[0])
        return outcome


@dataclass(frozen=True)
class _Job:
    """What all rounds share."""

    spec: LaunchSpec
    inbox: SignalInbox
    folder: RunFolder
    reaper: Reaper
    console: Console
    deadline: float | None
    values: dict[int, bytes]
    events: Events
    workers: list[Worker]


@contextlib.contextmanager
def _events(folder: str | None, host: str) -> Iterator[Events]:
    """Events, of which the last is said even if the launcher ends by an error of its own."""
    with contextlib.closing(Events(folder, host)) as events:
        try:
            yield events
        except (LaunchSpecError, RendezvousError) as error:
            events.note("ended", exit_code=error.exit_code, text=str(error))
            raise


def _note_signal(events: Events, signum: int) -> None:
    events.note("signal" if signum in ENDING else "signal_passed_on", name=signal.Signals(signum).name)


def _rounds(job: _Job, secret: str | None) -> "Alone | Together":
    if job.spec.rendezvous is None:
        return Alone(job.spec)
    from jaxpar_launch._together import Together  # one host starts faster without it

    return Together(job.spec, secret=secret, inbox=job.inbox, events=job.events)


def _run_round(job: _Job, round_: Round, rounds: "Alone | Together") -> Outcome:
    """Starts this host's workers and watches them to their end."""
    spec, events, workers = job.spec, job.events, job.workers
    is_first = not workers
    workers.clear()
    events.turn_to(round_)
    events.note("rendezvous", **_facts(round_, spec.nproc))

    def start(round_: Round, local_rank: int) -> Worker:
        events.turn_to(round_)
        worker = _start(spec, round_, local_rank, job.folder, job.console)
        events.note("worker_started", rank=worker.env.rank, local_rank=local_rank, pid=worker.pid)
        return worker

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [worker.close() for worker in workers])
        for local_rank in range(spec.nproc):
            workers.append(start(round_, local_rank))
            job.reaper.watch(worker.pid for worker in workers)
        if is_first and spec.has_logs and job.console.is_shown:
            print(f"jaxpar-launch: logs are in {job.folder.path}", file=sys.stderr, flush=True)
        group = Group(
            workers,
            spec=spec,
            inbox=job.inbox,
            console=job.console,
            deadline=job.deadline,
            reaper=job.reaper,
            outside=rounds.outside,
            recovery=rounds.recovery,
            start=start,
            events=events,
        )
        outcome = group.run()
        job.values.clear()
        job.values.update((worker.env.rank, worker.take_value()) for worker in workers)
        return outcome


def _facts(round_: Round, nproc: int) -> dict[str, Any]:
    return {
        "ranks": list(range(round_.first_rank, round_.first_rank + nproc)),
        "world_size": round_.world_size,
        "group_rank": round_.group_rank,
        "group_world_size": round_.group_world_size,
        "coordinator": join_address(round_.master_addr, round_.master_port),
    }


def worker_environ(spec: LaunchSpec, env: WorkerEnv, inherited: Mapping[str, str]) -> dict[str, str]:
    """A worker's whole environment: thread counts unless set, what is inherited, its place in the job."""
    user = {**inherited, **spec.environ}
    threads = thread_defaults(
        user,
        nproc=spec.nproc,
        num_cores=num_cores(),
        platform=spec.platform,
        devices_per_proc=spec.devices_per_proc,
    )
    kept = spec.compilation_cache_dir
    cache = {} if kept is None else {"JAXPAR_COMPILATION_CACHE_DIR": os.path.abspath(kept)}
    return {**threads, **user, **cache, **env.to_environ()}


def _start(spec: LaunchSpec, round_: Round, local_rank: int, folder: RunFolder, console: Console) -> Worker:
    place = folder.of_worker(attempt=round_.number, local_rank=local_rank)
    env = round_.worker_env(spec, local_rank=local_rank, error_file=os.path.join(place, "error.json"))
    environ = worker_environ(spec, env, inherited_environ())
    try:
        return Worker.start(spec, env, environ=environ, folder=place, console=console)
    except OSError as error:
        raise LaunchSpecError(
            f"{spec.argv('')[0]!r} cannot be run: {error.strerror}. After --no-python stands a program that is on "
            "PATH or a path to one."
        ) from error
