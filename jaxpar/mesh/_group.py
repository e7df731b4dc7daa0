"""The process group: which of how many processes this is, and the store in which they meet.

    rank 0 --.
    rank 1 ---+-- job store (hosted by the launcher, or by rank 0)      facts about the job: small, with deadlines
    rank 2 --'
       '========= collectives of XLA                                    arrays: large, in the compiled program

One mechanism for every way to start a job. JAX's own key-value service would be private API, dies with rank 0, and
cannot say who is missing before `jax.distributed` is up; the store can.
"""

import functools
import os
import threading
from collections import Counter
from dataclasses import dataclass

from jaxpar._errors import WorkerLostError
from jaxpar_launch.store import StoreClient, StoreServer


@dataclass(frozen=True)
class Membership:
    """A process's place in its job, as asked for. Where nobody says the local rank, the roll call counts it.

    `recoverable`: JAX's coordination service runs outside the job's processes, so that any of them may be lost.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    coordinator_address: str | None = None
    local_device_ids: tuple[int, ...] | None = None
    preemption: bool = False
    recoverable: bool = False


@dataclass(frozen=True)
class Venue:
    """Where the processes of a job meet: a store, and the part of its keys that is this job's."""

    address: str
    token: str
    prefix: str


@dataclass(frozen=True)
class Patience:
    """How long to wait, for the whole of joining and for JAX's own waits later."""

    timeout_s: float
    heartbeat_timeout_s: float
    shutdown_timeout_s: float


class ProcessGroup:
    """This process as a member of its job. A world of one has no store and needs none."""

    def __init__(
        self,
        membership: Membership,
        *,
        timeout_s: float,
        shutdown_timeout_s: float,
        store: StoreClient | None = None,
        hosted: StoreServer | None = None,
        prefix: str = "",
    ) -> None:
        self.membership = membership
        self.timeout_s = timeout_s
        self.shutdown_timeout_s = shutdown_timeout_s
        self.prefix = prefix
        self.pid = os.getpid()
        self.is_broken = False
        self._first_store = store
        self._stores = [] if store is None else [store]
        self._hosted = hosted
        self._rounds: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._local.store = store

    @property
    def rank(self) -> int:
        """This process, 0 to `world_size - 1`."""
        return self.membership.rank

    @property
    def world_size(self) -> int:
        """How many processes the job has."""
        return self.membership.world_size

    @property
    def store(self) -> StoreClient:
        """This thread's own connection to the store, so that a wait in one thread does not stop another."""
        assert self._first_store is not None, "a world of one has no store"
        if not hasattr(self._local, "store"):
            self._local.store = self._first_store.clone()
            with self._lock:
                self._stores.append(self._local.store)
        return self._local.store

    def next_round(self, name: str) -> int:
        """How often this process has been to the meeting `name`: equal on all processes that are in step."""
        with self._lock:
            self._rounds[name] += 1
            return self._rounds[name]

    def report_failure(self, reason: str) -> None:
        """Leaves word why this process fails, for the error messages of those who miss it. In a second at most."""
        if self._first_store is not None:
            with self._first_store.clone(timeout_s=1.0) as store:
                store.set(f"{self.prefix}/failed/{self.rank}", reason[:500])

    def break_up(self) -> None:
        """A process was lost: whoever waits for it in the store, in any thread, waits no more."""
        self.is_broken = True
        with self._lock:
            stores = list(self._stores)
        for store in stores:
            store.interrupt()

    def check(self) -> None:
        """Leaves the world that lost a process.

        Raises:
            WorkerLostError: it did.
        """
        if self.is_broken:
            raise WorkerLostError(
                f"a worker of this world of {self.world_size} was lost and is being replaced (this is rank {self.rank}). Let this"
                " error pass: run_recoverable calls its function again in the new world."
            )

    def close(self) -> None:
        """Closes the connections to the store, and the store if this process hosts it."""
        for store in self._stores:
            store.close()
        if self._hosted is not None:
            self._hosted.close()


@dataclass
class _Slot:
    """The one process group of this process, as `jax.distributed` has one client."""

    group: ProcessGroup | None = None


@functools.cache
def group_slot() -> _Slot:
    """The slot that `init_process_group` fills and `destroy_process_group` empties."""
    return _Slot()
