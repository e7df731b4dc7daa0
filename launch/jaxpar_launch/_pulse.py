"""A thread that says "I am here" for this host's launcher, and listens for the end of the round it is in.

    every interval     beat/<id> += 1                            |-- the others' beats stand still: they are lost
    at once            <round>/end is set ---> fd is readable    |-- launchers arrived: the round ends, to let them in
    when killed        the store sets <round>/end, by its will

Beats are compared with the listener's own clock only: clocks of hosts need not agree.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from jaxpar_launch._members import End, State
from jaxpar_launch._outcome import TIMEOUT_EXIT_CODE, shell_code, told
from jaxpar_launch._report import Failure
from jaxpar_launch.store import StoreError, StoreTimeoutError

STATE = "state"


class Store(Protocol):
    """What a meeting uses of the place where it is kept: `StoreClient`, or `EtcdClient`."""

    def set(self, key: str, value: Any) -> None: ...
    def try_get(self, key: str) -> Any: ...
    def get(self, key: str, timeout_s: float | None = None) -> Any: ...
    def compare_set(self, key: str, expected: Any, value: Any) -> Any: ...
    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None: ...
    def leave_will(self, key: str | None, value: Any = True) -> None: ...
    def delete_prefix(self, prefix: str) -> int: ...
    def clone(self) -> "Store": ...
    def close(self) -> None: ...


class Freshness:
    """Whose beats stand still.

    Args:
        patience_s: how long they may.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen: dict[str, tuple[int | None, float]] = {}

    def stale(self, beats: Mapping[str, int | None]) -> list[str]:
        """Those of `beats` that have not changed for too long."""
        now = time.monotonic()
        for who, beat in beats.items():
            if who not in self._seen or self._seen[who][0] != beat:
                self._seen[who] = (beat, now)
        return [who for who in beats if now - self._seen[who][1] > self._patience_s]


def beats_of(client: Store, ids: Iterable[str]) -> dict[str, int | None]:
    """The last beat of each."""
    return {who: client.try_get(f"beat/{who}") for who in ids}


def claim_end(client: Store, round_: int, end: End) -> End:
    """Ends a round, unless somebody has; returns the end that counts."""
    return End(**client.compare_set(f"{round_}/end", None, asdict(end)))


def failure_of(root: Failure) -> End:
    """A worker's failure as the other hosts are told of it."""
    text = f"rank {root.rank} on host {root.host} failed ({root.cause}{told(root)})"
    return End(
        kind="failure", host=root.host, text=text, exit_code=shell_code(root.exit_code), rank=root.rank
    )


class Pulse:
    """Beats and listens until closed.

    Args:
        client: a connection of its own.
        member_id: whose beat it is.
        host: its name.
        interval_s: between beats.
        patience_s: how long another's beat may stand still.
        most: how many launchers a round takes.
    """

    def __init__(
        self,
        client: Store,
        member_id: str,
        host: str,
        *,
        interval_s: float,
        patience_s: float,
        most: int,
    ) -> None:
        self._client, self._id, self._host = client, member_id, host
        self._interval_s, self._most = interval_s, most
        self._freshness = Freshness(patience_s)
        self._state: State | None = None
        self._willed: State | None = None  # the round that ends with this connection
        self._wake, self._is_closing = threading.Event(), False
        self._found: tuple[State, End] | None = (
            None  # of which round, so that an old end is never taken for a new one
        )
        self.cut_off: str | None = None  # why the rendezvous is gone
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self._thread = threading.Thread(target=self._run, name="jaxpar-pulse", daemon=True)
        self._thread.start()

    def watch(self, state: State | None) -> None:
        """Listens for the end of this round; None: of none."""
        self._state = state
        self._wake.set()

    @property
    def end(self) -> End | None:
        """How the round ended that is listened to, if it has."""
        found, state = self._found, self._state
        return found[1] if found is not None and found[0] is state else None

    def take(self) -> bool:
        """Whether the round has ended, or nobody can tell any more."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 64)
        return self.end is not None or self.cut_off is not None

    @property
    def is_hang(self) -> bool:
        """Whether it has ended because a worker makes no progress."""
        end = self.end
        return end is not None and end.kind == "hang"

    @property
    def is_change(self) -> bool:
        """Whether it has ended because hosts joined or leave, with all workers in good health."""
        end = self.end
        return end is not None and end.kind in ("joined", "left")

    def blame(self, root: Failure) -> None:
        """Ends the round everywhere, because of a worker that failed here."""
        self._end_everywhere(failure_of(root))

    def report_hang(self) -> None:
        """Ends the round everywhere, because a worker here makes no progress."""
        text = f"a worker on host {self._host} makes no progress"
        self._end_everywhere(End(kind="hang", host=self._host, text=text, exit_code=TIMEOUT_EXIT_CODE))

    def _end_everywhere(self, end: End) -> None:
        state = self._state
        if state is not None:
            with contextlib.suppress(StoreError), contextlib.closing(self._client.clone()) as client:
                claim_end(client, state.round, end)

    def close(self) -> None:
        """Ends the thread."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(timeout=self._interval_s + 5)
        self._client.close()
        for end in (self.fd, self._write_fd):
            os.close(end)

    def _run(self) -> None:
        beat = 0
        while not self._is_closing:
            beat += 1
            state = self._state
            try:
                self._client.set(f"beat/{self._id}", beat)
                self._leave_will(state)
                if state is None or self.end is not None:
                    self._wake.wait(self._interval_s)
                    self._wake.clear()
                else:
                    self._listen(state)
            except StoreError as error:
                self.cut_off = str(error)
                os.write(self._write_fd, b"x")
                return
        with contextlib.suppress(StoreError):
            self._leave_will(None)

    def _leave_will(self, state: State | None) -> None:
        """Whoever kills this launcher ends the round."""
        if state is not self._willed:
            text = f"the launcher on host {self._host} is gone: its connection ended"
            end = asdict(End(kind="lost", host=self._host, text=text, exit_code=1, lost=self._id))
            self._client.leave_will(None if state is None else f"{state.round}/end", end)
            self._willed = state

    def _listen(self, state: State) -> None:
        """For one interval."""
        with contextlib.suppress(StoreTimeoutError):
            end = self._client.get(f"{state.round}/end", timeout_s=self._interval_s)
            self._found = state, End(**end)
            os.write(self._write_fd, b"x")
            return
        others = {member.id: member for member in state.members if member.id != self._id}
        for who in self._freshness.stale(beats_of(self._client, others)):
            text = f"the launcher on host {others[who].host} is gone: no sign of life"
            end = End(kind="lost", host=others[who].host, text=text, exit_code=1, lost=who)
            claim_end(self._client, state.round, end)
            return
        now = State.from_wire(self._client.try_get(STATE))
        if state.members[0].id == self._id and now.newcomers and len(now.members) < self._most:
            text = f"{', '.join(member.host for member in now.newcomers)} joined"
            claim_end(self._client, state.round, End(kind="joined", host="", text=text, exit_code=1))
