"""In-place recovery, the launcher's half: a lost worker is replaced, the others keep their processes.

    a worker fails   are all others in `jaxpar.mesh.run_recoverable`, and is a restart left?    no: all start again
    yes              new service --> word to the survivors --> a new process takes the lost rank
    survivors        leave JAX, and come to the new world within --recover-timeout              late: all start again
    all joined       the job goes on

| key in the store             | set by                                                         |
|------------------------------|----------------------------------------------------------------|
| recovery/<n>/word            | the launcher: world n comes, with its coordinator               |
| recovery/<n>/came/<rank>     | a survivor that has left world n - 1                            |
| recovery/<n>/joined/<rank>   | a worker that is in world n                                     |
| recovery/over                | a worker, when all have come to the end: nobody can return      |

A world is numbered by the restarts before it. What a recovery began and a restart had to end counts once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxpar_launch._coordination import CoordinationServices
from jaxpar_launch._round import History, Round
from jaxpar_launch._spec import LaunchSpec
from jaxpar_launch._worker import Worker
from jaxpar_launch.store import StoreClient

_LOOK_S = 0.05


class InPlace:
    """Replaces lost workers of one round.

    Args:
        spec: what to run.
        round_: the round as it began.
        services: where JAX's coordination services run.
        store: a connection to the round's store.
        history: counts recoveries with the restarts.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        round_: Round,
        *,
        services: CoordinationServices,
        store: StoreClient,
        history: History,
    ) -> None:
        self._spec, self._round, self._services, self._store = spec, round_, services, store
        self._history = history
        self._survivors: list[int] = []
        self._late_at = self._look_at = 0.0
        self.is_under_way = False
        self.why_not = ""  # all have to start again

    def replace(
        self,
        lost: Sequence[Worker],
        survivors: Sequence[Worker],
        *,
        cause: str,
        start: Callable[[Round, int], Worker],
    ) -> list[Worker]:
        """Starts new workers for the lost ones and tells the survivors; none if all have to start again."""
        ranks = [worker.env.rank for worker in survivors]
        self.why_not = self._obstacle(ranks, num_lost=len(lost))
        if self.why_not:
            return []
        coordinator = self._services.open(self._round.master_addr, world_size=self._round.world_size)
        if coordinator is None:
            self.why_not = "the process with JAX's coordination services has ended"
            return []
        self._open_world(coordinator, cause)
        self._survivors, self.is_under_way = ranks, True
        self._late_at = time.monotonic() + self._spec.recover_timeout_s
        word = {"coordinator": coordinator, "pids": [worker.pid for worker in survivors]}
        self._store.set(f"recovery/{self._round.restart_count}/word", word)
        return [start(self._round, worker.env.local_rank) for worker in lost]

    def _obstacle(self, survivors: Sequence[int], *, num_lost: int) -> str:
        """Why all have to start again; "" if not."""
        self._settle()
        if self.is_under_way:
            return "before its world was complete"
        if self._history.num_restarts >= self._spec.max_restarts:
            return "no restart is left"
        if not survivors:
            return "nobody is left"
        if len(survivors) + num_lost < self._round.world_size or self._store.try_get("recovery/over"):
            return "others have come to their end"
        if outside := self._missing("joined", survivors):
            return f"{_ranks(outside)} not in run_recoverable"
        return ""

    def _open_world(self, coordinator: str, cause: str) -> None:
        history = self._history
        history.num_restarts += 1
        history.num_rounds += 1
        number = f"restart {history.num_restarts} of {self._spec.max_restarts}"
        history.story.append(f"{cause}; replaced in place, {number}")
        self._round = replace(
            self._round,
            number=history.num_rounds,
            restart_count=history.num_restarts,
            recovery=coordinator,
        )

    def _missing(self, what: str, ranks: Sequence[int]) -> list[int]:
        prefix = f"recovery/{self._round.restart_count}/{what}/"
        there = self._store.keys(prefix)
        return [rank for rank in ranks if f"{prefix}{rank}" not in there]

    def late(self) -> list[int]:
        """Survivors that have not left the old world in time; ends the recovery when all are in the new one."""
        now = time.monotonic()
        if not self.is_under_way or now < self._look_at:
            return []
        self._look_at = now + _LOOK_S
        self._settle()
        missing = self._missing("came", self._survivors) if now > self._late_at else []
        if missing:
            self.why_not = (
                f"{_ranks(missing)} did not leave the old world within {self._spec.recover_timeout_s:g} s"
            )
        return missing

    def _settle(self) -> None:
        """Ends the recovery when all are in the new world."""
        if self.is_under_way and not self._missing("joined", range(self._round.world_size)):
            self.is_under_way = False


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
