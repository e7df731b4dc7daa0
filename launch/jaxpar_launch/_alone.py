"""Rounds of a job on one host: each is a restart of the one before, at a new port, with a new store.

With `--recover in-place` a round outlives its workers' failures as long as those can be replaced (`_in_place.py`).
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxpar_launch._outcome import Outcome
from jaxpar_launch._ports import PortReservation
from jaxpar_launch._round import History, Round
from jaxpar_launch._spec import LaunchSpec
from jaxpar_launch.env import inherited_environ
from jaxpar_launch.store import StoreClient, StoreServer

if TYPE_CHECKING:
    from jaxpar_launch._in_place import InPlace

_STORE_S = 5.0


class Alone:
    """The rounds of one host's job.

    Args:
        spec: what to run.
    """

    outside = None

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._history = History()
        self.recovery: InPlace | None = None

    @contextlib.contextmanager
    def next_round(self) -> Iterator[Round]:
        """The next round; its port and its store are held as long as it lasts."""
        with contextlib.ExitStack() as stack:
            port = stack.enter_context(contextlib.closing(reserve_port(self._spec)))
            token = os.urandom(16).hex()
            store = stack.enter_context(contextlib.closing(StoreServer("127.0.0.1", token=token)))
            round_ = round_of_one_host(
                self._spec,
                number=self._history.num_rounds,
                restart_count=self._history.num_restarts,
                master_port=port.port,
                store=store.address,
                token=token,
            )
            if self._spec.recover == "in-place":
                client = stack.enter_context(StoreClient(store.address, token=token, timeout_s=_STORE_S))
                round_ = self._recoverable(round_, client, stack)
            yield round_

    def _recoverable(self, round_: Round, store: StoreClient, stack: contextlib.ExitStack) -> Round:
        from jaxpar_launch._coordination import CoordinationServices  # most jobs start faster without them
        from jaxpar_launch._in_place import InPlace

        environ = {**inherited_environ(), **self._spec.environ}
        services = CoordinationServices(self._spec.python, environ)
        stack.callback(services.close)
        address = services.open(round_.master_addr, world_size=round_.world_size)
        round_ = replace(round_, recovery=address)
        self.recovery = InPlace(self._spec, round_, services=services, store=store, history=self._history)
        return round_

    def conclude(self, outcome: Outcome) -> tuple[Outcome, str | None]:
        """How the job ended; or why it goes on."""
        history, most = self._history, self._spec.max_restarts
        is_counted = (
            self.recovery is not None and self.recovery.is_under_way
        )  # a recovery that came to nothing
        if not outcome.can_restart or (history.num_restarts >= most and not is_counted):
            return outcome.after(history.story), None
        history.num_rounds += 1
        history.num_restarts += 0 if is_counted else 1
        number = f"restart {history.num_restarts} of {most}"
        why_not = "" if self.recovery is None else self.recovery.why_not
        why = f"; not in place: {why_not}" if why_not else ""
        history.story.append(f"{outcome.cause}{why}; all workers start again, {number}")
        return outcome, history.story[-1]

    def close(self) -> None:
        """Nothing is held between rounds."""


def reserve_port(spec: LaunchSpec) -> PortReservation:
    """The port of this round's coordinator: the one asked for, else a free one."""
    if spec.master_port is not None:
        return PortReservation.claim(spec.master_addr, spec.master_port)
    return PortReservation.draw(spec.master_addr)


def round_of_one_host(
    spec: LaunchSpec, *, number: int, restart_count: int, master_port: int, store: str, token: str
) -> Round:
    """A round of a job on one host."""
    return Round(
        number=number,
        restart_count=restart_count,
        world_size=spec.nproc,
        first_rank=0,
        group_rank=0,
        group_world_size=1,
        master_addr=spec.master_addr,
        master_port=master_port,
        store=store,
        store_token=token,
    )
