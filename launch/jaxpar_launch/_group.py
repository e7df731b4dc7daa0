"""One round's workers on this host, from all started to all ended.

    running --a worker fails------> stopping (SIGTERM, failure_grace_s) --> SIGKILL --> ended
            --another host's does-> stopping (the same)
            --no progress---------> stacks and notes are collected, then the same
            --SIGTERM, SIGINT-----> stopping (the same signal, grace_s) --> SIGKILL --> ended
            --a worker fails------> replaced in place, if all others can go on (`_in_place.py`)
            --deadline------------> stopping (SIGABRT: stacks are printed)  SIGKILL --> ended
            --all exit with 0-----------------------------------------------------------> ended

One thread, one selector: output, exits and signals wake it at once; every `monitor_interval_s` it looks anyway.
A worker that exits with 0 leaves the others alone.
"""

import selectors
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from jaxpar_launch._events import Events, note_end
from jaxpar_launch._fates import Fate
from jaxpar_launch._hang import Place, Watchdog, places_of, summary
from jaxpar_launch._logs import Stream
from jaxpar_launch._outcome import TIMEOUT_EXIT_CODE, Outcome, cause_of, hang_text, shell_code
from jaxpar_launch._reaper import Reaper
from jaxpar_launch._report import Failure, exit_text, failure_text, ranked, signal_name
from jaxpar_launch._round import Round
from jaxpar_launch._signals import ENDING, SignalInbox
from jaxpar_launch._spec import LaunchSpec
from jaxpar_launch._worker import Console, Worker

if TYPE_CHECKING:
    from jaxpar_launch._in_place import InPlace
    from jaxpar_launch._members import End

_DRAIN_S = 0.5
_ABANDON_S = (
    30.0  # SIGKILL does not end a process that a driver holds in the kernel; say so instead of waiting on
)
_PIPE_CHUNKS = 16
_NOTICE_S = 0.5


class Outside(Protocol):
    """What ends a round from elsewhere."""

    fd: int

    def take(self) -> bool:
        """Whether it has."""
        ...

    @property
    def end(self) -> "End | None":
        """How, if that can be told."""
        ...

    @property
    def is_hang(self) -> bool:
        """Whether a worker somewhere makes no progress."""
        ...

    @property
    def is_change(self) -> bool:
        """Whether hosts joined or leave, and all workers are in good health: they may save."""
        ...

    def blame(self, root: Failure) -> None:
        """Tells the others of a failure here."""
        ...

    def report_hang(self) -> None:
        """Tells the others that a worker here makes no progress."""
        ...


class Group:
    """The workers of one round and what is being done with them."""

    def __init__(
        self,
        workers: list[Worker],
        *,
        spec: LaunchSpec,
        inbox: SignalInbox,
        reaper: Reaper,
        console: Console,
        deadline: float | None,
        outside: Outside | None = None,
        recovery: "InPlace | None" = None,
        start: Callable[[Round, int], Worker],
        events: Events,
    ) -> None:
        self._workers, self._spec, self._inbox = workers, spec, inbox
        self._console, self._host = console, console.hostname
        self._recovery, self._start, self._events = recovery, start, events
        self._lost: list[Failure] = []  # of a recovery under way
        self._reaper, self._outside = reaper, outside
        self._deadline = deadline  # of time.monotonic()
        self._kill_at: float | None = None
        self._abandon_at = float("inf")
        self._stop_signal: int | None = None
        self._was_stopped: set[int] = set()
        self._was_killed: set[int] = set()
        self._failures: list[Failure] = []
        self._user_signal: int | None = None
        self._is_timeout = self._is_ended_elsewhere = False
        self._watchdog = Watchdog(workers, spec.hang_timeout_s)
        self._hang: tuple[Place, ...] = ()

    def run(self) -> Outcome:
        """Watches the group until every worker has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._inbox.fd, selectors.EVENT_READ)
            if self._outside is not None:
                selector.register(self._outside.fd, selectors.EVENT_READ)
            for worker in self._workers:
                _listen_to(worker, selector)
            while any(worker.is_running for worker in self._workers) and time.monotonic() < self._abandon_at:
                self._wait(selector)
                self._look_at_exits(selector)
                self._look_at_recovery()
                self._obey_signals()
                self._listen()
                self._look_for_hangs()
                self._keep_deadlines()
        self._drain()
        return self._outcome()

    def _wait(self, selector: selectors.BaseSelector) -> None:
        """Sleeps until something happens, and moves output."""
        timers = [at for at in (self._kill_at, self._deadline) if at is not None]
        until = min([time.monotonic() + self._spec.monitor_interval_s, *timers])
        for key, _ in selector.select(max(until - time.monotonic(), 0)):
            if key.data is not None:
                _pump(key.data, selector)

    def _look_at_exits(self, selector: selectors.BaseSelector) -> None:
        """Collects all that ended since the last look before anyone is blamed."""
        ended = [worker for worker in self._workers if worker.look()]
        for worker in ended:
            if worker.exit_fd is not None:
                selector.unregister(worker.exit_fd)
            self._events.note("worker_ended", rank=worker.env.rank, pid=worker.pid, **_code(worker))
            for stream in worker.streams:
                for _ in range(_PIPE_CHUNKS):  # all that a pipe can hold: the report shows its end
                    _pump(stream, selector)
        if ended:
            self._reaper.watch(worker.pid for worker in self._workers if worker.is_running)
        failed = [worker for worker in ended if worker.exit_code != 0]
        if failed and self._stop_signal is None:
            failures = [Failure.of(worker, self._host) for worker in failed]
            if self._replace(failed, failures, selector):
                return
            self._failures = failures
            if self._recovery is not None and self._recovery.is_under_way:
                self._failures += self._lost  # they began it
            self._stop(signal.SIGTERM, self._spec.failure_grace_s)
            root = ranked(self._failures)[0]
            self._events.note("failure", rank=root.rank, text=cause_of(root))
            if self._outside is not None and not root.is_symptom:  # else somebody else has more to say
                self._outside.blame(root)

    def _replace(self, lost: list[Worker], failures: list[Failure], selector: selectors.BaseSelector) -> bool:
        """Puts new workers in the place of the lost ones, if the others can go on in their processes."""
        if self._recovery is None:
            return False
        cause = cause_of(ranked(failures)[0])
        survivors = [worker for worker in self._workers if worker.is_running]
        started = self._recovery.replace(lost, survivors, cause=cause, start=self._start)
        for old, new in zip(lost, started, strict=False):
            for stream in old.streams:
                if stream.is_open:
                    selector.unregister(stream.fd)
            old.close()
            self._workers[self._workers.index(old)] = new
            _listen_to(new, selector)
        if started:
            self._lost = failures
            self._events.note("replaced", text=cause)
            self._reaper.watch(worker.pid for worker in self._workers)
            if self._console.is_shown:
                _say(f"{cause}; replaced in place, the others go on")
        return bool(started)

    def _look_at_recovery(self) -> None:
        """Whoever does not leave the old world in time is stuck: all start again."""
        if self._recovery is not None and self._stop_signal is None and self._recovery.late():
            self._failures = self._lost
            self._events.note("failure", text=f"not replaced in place: {self._recovery.why_not}")
            self._stop(signal.SIGTERM, self._spec.failure_grace_s)

    def _obey_signals(self) -> None:
        for signum in self._inbox.take():
            if signum not in ENDING:
                self._send(signum)
            elif self._stop_signal is None:
                self._user_signal = signum
                self._stop(signum, self._spec.grace_s)
                _say(
                    f"{signal.Signals(signum).name} received and passed on; the workers have "
                    f"{self._spec.grace_s:g} s to end. Once more kills them at once."
                )
            else:
                self._user_signal = self._user_signal or signum
                self._kill_at = time.monotonic()

    def _listen(self) -> None:
        """Whether the round has ended on another host."""
        if self._outside is not None and self._outside.take() and self._stop_signal is None:
            self._is_ended_elsewhere = True
            note_end(self._events, self._outside.end)
            if self._outside.is_hang:
                self._hang = places_of(self._workers, self._host)
            is_change = self._outside.is_change
            self._stop(signal.SIGTERM, self._spec.grace_s if is_change else self._spec.failure_grace_s)

    def _look_for_hangs(self) -> None:
        if self._stop_signal is None and self._watchdog.has_hung():
            if self._outside is not None:
                self._outside.report_hang()
            self._hang = places_of(self._workers, self._host)
            self._events.note("hang", text=summary(self._hang))
            self._stop(signal.SIGTERM, self._spec.failure_grace_s)

    def _keep_deadlines(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._deadline, self._is_timeout = None, True
            self._events.note("out_of_time")
            self._stop(signal.SIGABRT, self._spec.failure_grace_s)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at, self._abandon_at = None, now + _ABANDON_S
            late = [worker for worker in self._workers if worker.is_running]
            self._was_killed |= {worker.env.rank for worker in late}
            self._events.note("killed", ranks=[worker.env.rank for worker in late])
            for worker in late:
                worker.kill()

    def _stop(self, signum: int, grace_s: float) -> None:
        """Asks everyone to end and sets the hour of SIGKILL."""
        self._stop_signal = signum
        self._was_stopped |= {worker.env.rank for worker in self._workers if worker.is_running}
        self._kill_at = min(time.monotonic() + grace_s, self._kill_at or float("inf"))
        self._send(signum)

    def _send(self, signum: int) -> None:
        for worker in self._workers:
            worker.send(signum)

    def _drain(self) -> None:
        """Takes the last output; a process that left its group may hold a pipe open, so not for ever."""
        streams = [stream for worker in self._workers for stream in worker.streams]
        until = time.monotonic() + _DRAIN_S
        while any(stream.is_open for stream in streams) and time.monotonic() < until:
            if not any([stream.pump() for stream in streams]):
                time.sleep(0.001)

    def _outcome(self) -> Outcome:
        failures = ranked(self._failures + self._slow_to_end())
        fates = self._fates(failures)
        if failures:
            return Outcome(
                shell_code(ranked(self._failures)[0].exit_code),
                failures,
                failure_text(failures[0]),
                fates,
                first=failures[0].rank,
                is_timeout=self._is_timeout,
                is_leaving=self._user_signal is not None,
            )
        if self._hang and self._user_signal is None:
            return Outcome(TIMEOUT_EXIT_CODE, (), hang_text(self._hang), hang=self._hang)
        if self._is_timeout:
            head = "jaxpar-launch: the job did not end in time and was killed."
            return Outcome(TIMEOUT_EXIT_CODE, (), head, fates, is_timeout=True)
        if self._user_signal is not None:
            head = f"jaxpar-launch: ended by {signal.Signals(self._user_signal).name}."
            return Outcome(128 + self._user_signal, (), head, fates, is_leaving=True)
        if self._is_ended_elsewhere:
            return Outcome(1, (), "jaxpar-launch: ended by another host.", fates)
        return Outcome(0, (), "", fates)

    def _slow_to_end(self) -> list[Failure]:
        """Those that had failed before the first one was seen to, but were still ending: writing files, telling others."""
        seen = {failure.pid: failure.time_s for failure in self._failures}
        # Of one that could not write when it failed, only the end is known, and that was seen a little later.
        first_s = min(
            (
                seen[worker.pid] - (_NOTICE_S if seen[worker.pid] == worker.ended_at else 0)
                for worker in self._workers
                if worker.pid in seen
            ),
            default=0.0,
        )
        others = [worker for worker in self._workers if worker.exit_code and worker.pid not in seen]
        return [failure for worker in others if (failure := Failure.of(worker, self._host)).time_s < first_s]

    def _fates(self, failures: tuple[Failure, ...]) -> tuple[Fate, ...]:
        """Of each rank; a failure counts, not how the worker ended that was put in its place."""
        workers = [(worker.env.rank, worker) for worker in self._workers]
        fates = {
            rank: Fate(rank, self._host, worker.pid, self._how_it_ended(worker)) for rank, worker in workers
        }
        for failure in reversed(failures):
            fates[failure.rank] = Fate.of(failure, is_first=failure is failures[0])
        return tuple(fates.values())

    def _how_it_ended(self, worker: Worker) -> str:
        if worker.exit_code is None:
            return f"survived SIGKILL for {_ABANDON_S:g} s: it is stuck in the kernel"
        ended = exit_text(worker.exit_code)
        if worker.env.rank in self._was_killed:
            return "killed by the launcher: it had not ended within the grace period"
        if worker.exit_code == 0 and worker.env.rank not in self._was_stopped:
            return f"had finished: {ended}"
        if worker.exit_code > 0 and self._failures:
            return f"stopped in consequence: {ended}"
        return f"stopped by the launcher: {ended}"


def _code(worker: Worker) -> dict[str, int | str]:
    code = worker.exit_code or 0
    return {"exit_code": code} if code >= 0 else {"signal": signal_name(-code)}


def _listen_to(worker: Worker, selector: selectors.BaseSelector) -> None:
    for stream in worker.streams:
        selector.register(stream.fd, selectors.EVENT_READ, stream)
    if worker.exit_fd is not None:
        selector.register(worker.exit_fd, selectors.EVENT_READ)


def _pump(stream: Stream, selector: selectors.BaseSelector) -> None:
    if stream.is_open:
        stream.pump()
        if not stream.is_open:
            selector.unregister(stream.fd)


def _say(text: str) -> None:
    print(f"jaxpar-launch: {text}", file=sys.stderr, flush=True)
