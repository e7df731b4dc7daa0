"""Rounds of a job on several hosts: launchers gather at the rendezvous, start together, and end together.

next_round   arrive -> wait for the others (enough of them: a last call; all: at once) -> sealed: ranks, port, store
outside      readable when the round ends elsewhere: a worker failed, a launcher is lost, hosts joined
conclude     own failure -> told to all; all is well -> wait until it is everywhere; then the next round, or the end
"""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from jaxpar_launch._errors import RendezvousError
from jaxpar_launch._events import Events, note_end
from jaxpar_launch._fates import Fate, table
from jaxpar_launch._hang import Place, summary
from jaxpar_launch._meeting_point import meet, own_address, secret_of
from jaxpar_launch._members import End, Member, State
from jaxpar_launch._outcome import Outcome, hang_text
from jaxpar_launch._ports import PortReservation
from jaxpar_launch._pulse import STATE, Freshness, Pulse, beats_of, claim_end, failure_of
from jaxpar_launch._round import Round
from jaxpar_launch._signals import ENDING, SignalInbox
from jaxpar_launch._spec import LaunchSpec
from jaxpar_launch.store import StoreError, StoreServer, StoreTimeoutError

_LOOK_S = 0.1
_FAREWELL_S = 5.0


class Together:
    """This host's part in the rounds of a job.

    Args:
        spec: what to run, and where to meet.
        secret: the job's token, if one was given.
        inbox: signals; one that ends the job also ends the waiting for others.
        events: told how a round ended elsewhere when the workers here were done.

    Raises:
        RendezvousError: nobody serves the rendezvous, or it is another job's.
    """

    recovery = None  # of one host's workers only

    def __init__(self, spec: LaunchSpec, *, secret: str | None, inbox: SignalInbox, events: Events) -> None:
        assert spec.rendezvous is not None
        self._spec, self._inbox, self._rdzv, self._events = spec, inbox, spec.rendezvous, events
        endpoint, conf = self._rdzv.endpoint, self._rdzv.conf
        token = secret_of(spec.run_id, secret)
        if self._rdzv.local_addr is not None:
            own_address(endpoint, self._rdzv.local_addr)  # a wrong one is refused before anyone is met
        self._server, self._client = meet(
            self._rdzv, run_id=spec.run_id, token=token, meanwhile=self._heed_signals
        )
        self._me = Member(
            id=os.urandom(8).hex(),
            host=socket.gethostname(),
            address=own_address(endpoint, self._rdzv.local_addr),
            nproc=spec.nproc,
            node_rank=self._rdzv.node_rank,
        )
        self._freshness = Freshness(conf.patience_s)
        self._state = State()
        self._earlier: list[str] = []
        self._is_in_round = self._is_gone = False
        self.outside = Pulse(
            self._client.clone(),
            self._me.id,
            self._me.host,
            interval_s=conf.keep_alive_interval,
            patience_s=conf.patience_s,
            most=self._rdzv.most,
        )

    @contextlib.contextmanager
    def next_round(self) -> Iterator[Round]:
        """Waits for the other launchers, and gives this one's place among them.

        Raises:
            RendezvousError: they did not come in time, or the job is over.
        """
        try:
            state = self._gather()
            self.outside.watch(state)
            self._is_in_round = True
            with contextlib.ExitStack() as stack:
                yield self._round(state, stack)
        except StoreError as error:
            raise self._gone(error) from error

    def conclude(self, outcome: Outcome) -> tuple[Outcome, str | None]:
        """How the job ended; or why it goes on.

        Raises:
            RendezvousError: the rendezvous was lost.
        """
        self._is_in_round = False
        try:
            end = self._end_of_round(outcome)
            self.outside.watch(None)
            if end is not None and end.kind == "hang":
                outcome = self._with_all_places(outcome)
                end = replace(end, text=summary(outcome.hang))
            if end is None:
                self._update(lambda s: s.finish(End(kind="done", host="", text="", exit_code=0)))
                return outcome, None
            self._client.set(self._fates_of(self._me), [fate.to_wire() for fate in outcome.fates])
            state = self._update(
                lambda s: s.end(
                    self._state.round,
                    end,
                    max_restarts=self._spec.max_restarts,
                    least=self._rdzv.least,
                    most=self._rdzv.most,
                )
            )
        except StoreError as error:
            raise self._gone(error, *table(outcome.fates, first=outcome.first)) from error
        if outcome.is_leaving:
            return outcome, None
        if state.over is not None and state.round == self._state.round:
            return self._final(outcome, state.over), None
        self._me = replace(self._me, last_rank=self._state.rank_of(self._me.id))
        counted = f", restart {state.restarts} of {self._spec.max_restarts}" if end.costs_a_restart else ""
        self._earlier.append(f"{end.text}; all workers start again{counted}")
        return outcome, self._earlier[-1]

    def close(self) -> None:
        """Takes leave; whoever serves the rendezvous waits until the others have heard how the job ended."""
        is_gone = self._is_gone or self.outside.cut_off is not None
        if not is_gone:
            self._take_leave()
        self.outside.close()
        if not is_gone:
            with contextlib.suppress(StoreError):
                self._clear_up()
        self._client.close()
        if self._server is not None:
            self._server.close()

    def _take_leave(self) -> None:
        with contextlib.suppress(StoreError):
            if self._is_in_round:  # an error of its own: the others need not wait for signs of life
                text = f"the launcher on host {self._me.host} ended early"
                claim_end(
                    self._client,
                    self._state.round,
                    End(kind="lost", host=self._me.host, text=text, exit_code=1),
                )
            self._update(lambda s: s.drop([self._me.id]))
            self._client.set(f"bye/{self._me.id}", True)

    def _clear_up(self) -> None:
        """Whoever serves the meeting, or was first in it, waits for the others; etcd would keep it for ever."""
        members = self._state.members
        is_first = bool(members) and members[0].id == self._me.id
        is_kept = self._rdzv.backend == "etcd"
        over = State.from_wire(self._client.try_get(STATE)).over
        if self._server is not None or (is_kept and is_first and over is not None):
            lost = over.lost if over is not None else ""
            others = [m.id for m in members if m.id not in (self._me.id, lost)]
            stale = self._freshness.stale(beats_of(self._client, others))
            with contextlib.suppress(StoreTimeoutError):
                self._client.wait([f"bye/{who}" for who in others if who not in stale], timeout_s=_FAREWELL_S)
            if is_kept:
                self._client.delete_prefix("")

    def _gone(self, error: StoreError, *more: str) -> RendezvousError:
        self._is_gone = True
        return RendezvousError(
            "\n  ".join([f"the rendezvous at {self._rdzv.endpoint} is gone: {error}", *more])
        )

    # Gathering

    def _gather(self) -> State:
        conf, least, most = self._rdzv.conf, self._rdzv.least, self._rdzv.most
        deadline = time.monotonic() + conf.join_timeout
        seen, since = None, time.monotonic()
        while True:
            state = self._update(lambda s: s.arrive(self._me, most=most))
            if state.over:
                text = state.over.text or "it is done"
                raise RendezvousError(
                    f"the job {self._spec.run_id!r} is over: {text}. For a new one take another --rdzv-id.",
                    exit_code=state.over.exit_code or 1,
                )
            if state.is_running and state.rank_of(self._me.id) is not None:
                self._state = state
                return self._checked(state)
            if not state.is_running:
                ids = [member.id for member in (*state.members, *state.newcomers)]
                if stale := self._freshness.stale(beats_of(self._client, ids)):
                    self._update(lambda s, stale=stale: s.drop(stale))
                    continue
                if (state.round, ids) != seen:
                    seen, since = (state.round, ids), time.monotonic()
                waited_s = time.monotonic() - since
                if len(state.members) == most or (
                    len(state.members) >= least and waited_s >= conf.last_call_timeout
                ):
                    self._update(lambda s, number=state.round: s.seal(number))
                    continue
            self._look_up(deadline, state)

    def _look_up(self, deadline: float, state: State) -> None:
        """A short wait; for a signal, and for the end of patience."""
        self._heed_signals()
        if time.monotonic() > deadline:
            here = ", ".join(member.host for member in state.members) or "nobody"
            raise RendezvousError(
                f"{len(state.members)} of {self._rdzv.least} nodes came to {self._rdzv.endpoint} within "
                f"{self._rdzv.conf.join_timeout:g} s: {here}. Start jaxpar-launch on the others with the same --rdzv-endpoint and "
                "--rdzv-id, or write --nnodes MIN:MAX with a smaller MIN."
            )
        time.sleep(_LOOK_S)

    def _heed_signals(self) -> None:
        if asked := [signum for signum in self._inbox.take() if signum in ENDING]:
            raise RendezvousError("told to end while waiting for the other hosts.", exit_code=128 + asked[0])

    def _checked(self, state: State) -> State:
        """Are the places given by hand all different, and can the hosts reach each other?"""
        asked = [m.node_rank for m in state.members if m.node_rank is not None]
        if len(set(asked)) != len(asked) or any(rank >= len(state.members) for rank in asked):
            raise self._refused(
                f"--node-rank: the {len(state.members)} nodes say {asked}. Each needs its own number from 0 to {len(state.members) - 1}."
            )
        hosts = {member.host for member in state.members}
        if len(hosts) > 1 and (
            near := [m.host for m in state.members if ipaddress.ip_address(m.address).is_loopback]
        ):
            raise self._refused(
                f"host {near[0]} would meet the others at a loopback address, which leads nowhere from there. Write an "
                "--rdzv-endpoint that is no loopback address, or --local-addr with an address that the others can reach."
            )
        return state

    def _refused(self, text: str) -> RendezvousError:
        self._update(lambda s: s.finish(End(kind="refused", host=self._me.host, text=text, exit_code=2)))
        return RendezvousError(text, exit_code=2)

    def _round(self, state: State, stack: contextlib.ExitStack) -> Round:
        group_rank = state.rank_of(self._me.id)
        assert group_rank is not None
        place = self._place(state, stack) if group_rank == 0 else self._place_of(state)
        return Round(
            number=state.round,
            restart_count=state.restarts,
            world_size=state.world_size,
            first_rank=state.first_rank(group_rank),
            group_rank=group_rank,
            group_world_size=len(state.members),
            master_addr=state.members[0].address,
            master_port=place["port"],
            store=place["store"],
            store_token=place["token"],
        )

    def _place(self, state: State, stack: contextlib.ExitStack) -> dict:
        """The first launcher's: a free port for JAX, and a store for the workers."""
        port = stack.enter_context(contextlib.closing(PortReservation.draw(self._me.address)))
        token = os.urandom(16).hex()
        store = stack.enter_context(contextlib.closing(StoreServer(self._me.address, token=token)))
        place = {"port": port.port, "store": store.address, "token": token}
        self._client.set(f"{state.round}/place", place)
        return place

    def _place_of(self, state: State) -> dict:
        deadline = time.monotonic() + self._rdzv.conf.join_timeout
        while True:
            with contextlib.suppress(StoreTimeoutError):
                return self._client.get(f"{state.round}/place", timeout_s=1)
            if self.outside.end is not None:  # it was lost before it could say
                return {"port": 1, "store": None, "token": None}
            self._look_up(deadline, state)

    # The end of a round

    def _end_of_round(self, outcome: Outcome) -> End | None:
        """Why it ended early; None if all workers everywhere are done."""
        number = self._state.round
        if outcome.is_leaving:
            text = f"the launcher on host {self._me.host} was told to end"
            return claim_end(
                self._client,
                number,
                End(kind="left", host=self._me.host, text=text, exit_code=outcome.exit_code),
            )
        if self.outside.cut_off is not None:
            raise StoreError(self.outside.cut_off)
        if outcome.failures:
            return claim_end(self._client, number, failure_of(outcome.failures[0]))
        if outcome.exit_code or self.outside.end is not None:
            return End(**self._client.get(f"{number}/end", timeout_s=_FAREWELL_S))
        self._client.set(f"{number}/done/{self._me.id}", True)
        done = [f"{number}/done/{member.id}" for member in self._state.members]
        while not self.outside.take():
            with contextlib.suppress(StoreTimeoutError):
                self._client.wait(done, timeout_s=0.5)
                return None
            if asked := [signum for signum in self._inbox.take() if signum in ENDING]:
                return self._end_of_round(replace(outcome, is_leaving=True, exit_code=128 + asked[0]))
        note_end(self._events, self.outside.end)
        if self.outside.cut_off is not None:
            raise StoreError(self.outside.cut_off)
        return self.outside.end

    def _with_all_places(self, outcome: Outcome) -> Outcome:
        """Where the workers of all hosts were when the round hung, as far as their launchers say in time."""
        mine = f"{self._state.round}/hang/"
        self._client.set(mine + self._me.id, [place.to_wire() for place in outcome.hang])
        with contextlib.suppress(StoreTimeoutError):
            self._client.wait([mine + member.id for member in self._state.members], timeout_s=_FAREWELL_S)
        said = [self._client.try_get(mine + member.id) or [] for member in self._state.members]
        places = tuple(Place(**wire) for some in said for wire in some)
        return replace(outcome, hang=places, head=hang_text(places))

    def _final(self, outcome: Outcome, over: End) -> Outcome:
        """The end of the job as this host tells it."""
        if outcome.hang:
            return outcome.after(self._earlier)
        fates = self._all_fates(over) or outcome.fates
        if over.rank in [failure.rank for failure in outcome.failures]:
            return replace(outcome, fates=fates).after(self._earlier)
        tail = next((fate.tail for fate in fates if fate.rank == over.rank), ())
        lines = [f"jaxpar-launch: the job has ended: {over.text}."]
        if tail:
            lines += [f"  last lines of the output of rank {over.rank}:", *(f"  | {line}" for line in tail)]
        return Outcome(over.exit_code, (), "\n".join(lines), fates, first=over.rank).after(self._earlier)

    def _all_fates(self, over: End) -> tuple[Fate, ...]:
        """How the workers of all hosts ended, as far as their launchers say in time."""
        members = self._state.members
        fates: list[Fate] = []
        with contextlib.suppress(StoreError):
            with contextlib.suppress(StoreTimeoutError):
                here = [self._fates_of(member) for member in members if member.id != over.lost]
                self._client.wait(here, timeout_s=_FAREWELL_S)
            for place, member in enumerate(members):
                said = self._client.try_get(self._fates_of(member))
                first = self._state.first_rank(place)
                unknown = "not known: its launcher is gone"
                fates += map(Fate.from_wire, said or ())
                fates += (
                    () if said else [Fate(first + i, member.host, 0, unknown) for i in range(member.nproc)]
                )
        return tuple(fates)

    def _fates_of(self, member: Member) -> str:
        return f"{self._state.round}/fates/{member.id}"

    def _update(self, step: Callable[[State], State]) -> State:
        """Makes a step from whatever the state is by now."""
        while True:
            wire = self._client.try_get(STATE)
            new = step(State.from_wire(wire)).to_wire()
            if new == wire or self._client.compare_set(STATE, wire, new) == new:
                return State.from_wire(new)
