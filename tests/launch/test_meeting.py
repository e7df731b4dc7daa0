"""Launchers that do not come together say why, in bounded time (row E8)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jaxpar_launch import LaunchSpec, LaunchSpecError, RendezvousConf, RendezvousError, RendezvousSpec, launch
from jaxpar_launch._meeting_point import secret_of
from jaxpar_launch._members import End, Member, State
from jaxpar_launch._ports import PortReservation
from jaxpar_launch._pulse import STATE
from jaxpar_launch.store import StoreClient, StoreServer


def spec(endpoint: str, **fields: object) -> LaunchSpec:
    conf = RendezvousConf(join_timeout=1.5, last_call_timeout=0.2)
    meeting = RendezvousSpec(**{"endpoint": endpoint, "least": 2, "most": 2, "conf": conf} | fields)  # pyright: ignore
    return LaunchSpec(command=("true",), kind="program", rendezvous=meeting)


def free_endpoint() -> str:
    port = PortReservation.draw("127.0.0.1")
    port.close()
    return f"127.0.0.1:{port.port}"


@contextmanager
def serving(state: State, *, token: str) -> Iterator[str]:
    """A meeting of the job "none" in this state."""
    with StoreServer("127.0.0.1", token=token) as server:
        with StoreClient(server.address, token=token, timeout_s=5) as client:
            client.set(STATE, state.to_wire())
        yield server.address


def test_a_job_that_is_over_is_not_joined() -> None:
    over = End(kind="failure", host="a", text="rank 0 on host a failed (exit code 3)", exit_code=3)
    with serving(State(over=over), token=secret_of("none", None)) as endpoint:
        with pytest.raises(
            RendezvousError, match=r"the job 'none' is over: rank 0 on host a failed .*another --rdzv-id"
        ) as e:
            launch(spec(endpoint), timeout_s=20)
    assert e.value.exit_code == 3


def test_a_job_of_another_secret_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(State(), token=secret_of("none", "secret")) as endpoint:
        with pytest.raises(RendezvousError, match=f"the rendezvous at {endpoint} is another job's"):
            launch(spec(endpoint), timeout_s=20)
        monkeypatch.setenv("JAXPAR_RDZV_TOKEN", "secret")
        with pytest.raises(RendezvousError, match="1 of 2 nodes came to"):
            launch(spec(endpoint), timeout_s=20)


def test_where_nobody_serves_it_is_said_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(
        RendezvousError, match=r"no rendezvous at 192\.0\.2\.1:29400 within 1\.5 s: .*Start jaxpar-launch"
    ):
        launch(spec("192.0.2.1:29400"), timeout_s=20)  # an address of nobody's (RFC 5737)
    assert time.monotonic() - start < 6


def test_hosts_do_not_meet_at_an_address_that_leads_nowhere() -> None:
    other = Member(id="x", host="elsewhere", address="10.0.0.1", nproc=1)
    with serving(State(members=(other,)), token=secret_of("none", None)) as endpoint:
        with pytest.raises(
            RendezvousError, match="would meet the others at a loopback address.*Write an --rdzv-endpoint"
        ):
            launch(spec(endpoint), timeout_s=20)


def test_an_address_of_another_host_cannot_be_this_ones() -> None:
    with pytest.raises(LaunchSpecError, match=r"--local-addr 192\.0\.2\.1 is no address of this host"):
        launch(spec(free_endpoint(), local_addr="192.0.2.1"), timeout_s=20)


def test_a_host_alone_is_enough_if_so_asked() -> None:
    assert launch(spec(free_endpoint(), least=1, local_addr="127.0.0.1"), timeout_s=20).exit_code == 0
