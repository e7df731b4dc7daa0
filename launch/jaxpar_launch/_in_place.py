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
from jaxpar_launch.store import StoreClient, StoreError

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
        if not ranks or len(ranks) + len(lost) < self._round.world_size or not self._is_possible(ranks):
            return []
        coordinator = self._services.open(self._round.master_addr, world_size=self._round.world_size)
        if coordinator is None:
            return []
        history, spec = self._history, self._spec
        history.num_restarts += 1
        history.num_rounds += 1
        history.story.append(
            f"{cause}; replaced in place, restart {history.num_restarts} of {spec.max_restarts}"
        )
        self._round = replace(
            self._round,
            number=history.num_rounds,
            restart_count=history.num_restarts,
            recovery=coordinator,
        )
        self._survivors, self.is_under_way = ranks, True
        self._late_at = time.monotonic() + spec.recover_timeout_s
        word = {"coordinator": coordinator, "pids": [worker.pid for worker in survivors]}
        self._store.set(f"recovery/{history.num_restarts}/word", word)
        return [start(self._round, worker.env.local_rank) for worker in lost]

    def _is_possible(self, survivors: Sequence[int]) -> bool:
        if self.is_under_way or self._history.num_restarts >= self._spec.max_restarts:
            return False
        try:
            return self._store.try_get("recovery/over") is None and not self._missing("joined", survivors)
        except StoreError:
            return False

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
        missing = self._missing("came", self._survivors)
        if missing and now > self._late_at:
            self._history.story.append(
                f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} did not leave the old world within "
                f"{self._spec.recover_timeout_s:g} s"
            )
            return missing
        if not missing and not self._missing("joined", range(self._round.world_size)):
            self.is_under_way = False
        return []
