"""Rounds of a job on one host: each is a restart of the one before, at a new port, with a new store."""

import contextlib
import os
from collections.abc import Iterator

from jaxpar_launch._outcome import Outcome
from jaxpar_launch._ports import PortReservation
from jaxpar_launch._round import Round
from jaxpar_launch._spec import LaunchSpec
from jaxpar_launch.store import StoreServer


class Alone:
    """The rounds of one host's job.

    Args:
        spec: what to run.
    """

    outside = None

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._earlier: list[str] = []

    @contextlib.contextmanager
    def next_round(self) -> Iterator[Round]:
        """The next round; its port and its store are held as long as it lasts."""
        with contextlib.ExitStack() as stack:
            port = stack.enter_context(contextlib.closing(reserve_port(self._spec)))
            token = os.urandom(16).hex()
            store = stack.enter_context(contextlib.closing(StoreServer("127.0.0.1", token=token)))
            yield round_of_one_host(
                self._spec,
                number=len(self._earlier),
                master_port=port.port,
                store=store.address,
                token=token,
            )

    def conclude(self, outcome: Outcome) -> tuple[Outcome, str | None]:
        """How the job ended; or why it goes on."""
        if not outcome.can_restart or len(self._earlier) >= self._spec.max_restarts:
            return outcome.after(self._earlier), None
        number = f"restart {len(self._earlier) + 1} of {self._spec.max_restarts}"
        self._earlier.append(f"{outcome.cause}; all workers start again, {number}")
        return outcome, self._earlier[-1]

    def close(self) -> None:
        """Nothing is held between rounds."""


def reserve_port(spec: LaunchSpec) -> PortReservation:
    """The port of this round's coordinator: the one asked for, else a free one."""
    if spec.master_port is not None:
        return PortReservation.claim(spec.master_addr, spec.master_port)
    return PortReservation.draw(spec.master_addr)


def round_of_one_host(spec: LaunchSpec, *, number: int, master_port: int, store: str, token: str) -> Round:
    """A round of a job on one host."""
    return Round(
        number=number,
        restart_count=number,
        world_size=spec.nproc,
        first_rank=0,
        group_rank=0,
        group_world_size=1,
        master_addr=spec.master_addr,
        master_port=master_port,
        store=store,
        store_token=token,
    )
