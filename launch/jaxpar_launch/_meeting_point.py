"""Where launchers of several hosts meet: one of them serves the store at the endpoint, all are its clients.

--rdzv-endpoint node0:29400      on node0: listen there        elsewhere: connect, and try until node0 is up
                                 address of this host: --local-addr, else the one by which it reaches node0
--rdzv-backend etcd              nobody listens: etcd keeps the meeting, and any host may die
"""

import contextlib
import hashlib
import socket
from collections.abc import Callable

from jaxpar_launch._errors import LaunchSpecError, RendezvousError
from jaxpar_launch._pulse import Store
from jaxpar_launch._rdzv_spec import RendezvousSpec
from jaxpar_launch.env import split_address
from jaxpar_launch.store import StoreAuthenticationError, StoreClient, StoreError, StoreServer

_PATIENCE_S = 5.0  # with a store that was there: its host may be gone


def meet(
    rendezvous: RendezvousSpec, *, run_id: str, token: str, meanwhile: Callable[[], None]
) -> tuple[StoreServer | None, Store]:
    """The store at an endpoint; a server if it is this host that serves it.

    Args:
        rendezvous: where.
        run_id: the job's name.
        token: its secret.
        meanwhile: called between two tries; what it raises ends them.

    Raises:
        RendezvousError: nobody serves it in time, it is another job's, or etcd does not let us in.
        LaunchSpecError: the password of etcd's user is missing, or a file is no certificate.
    """
    endpoint, timeout_s = rendezvous.endpoint, rendezvous.conf.join_timeout
    if rendezvous.backend == "etcd":
        return None, _at_etcd(rendezvous, run_id, meanwhile)
    server = _serve(endpoint, token)
    try:
        with StoreClient(endpoint, token=token, timeout_s=timeout_s, meanwhile=meanwhile) as patient:
            return server, patient.clone(timeout_s=_PATIENCE_S)
    except StoreAuthenticationError as error:
        raise RendezvousError(
            f"the rendezvous at {endpoint} is another job's, or no jaxpar-launch's: {error}. Give every node the same --rdzv-id and "
            "JAXPAR_RDZV_TOKEN, or take another port."
        ) from error
    except StoreError as error:
        if server is not None:
            server.close()
        raise RendezvousError(
            f"no rendezvous at {endpoint} within {timeout_s:g} s: {error}. Start jaxpar-launch with this --rdzv-endpoint on that "
            "host too, and let the port through its firewall; --rdzv-conf join_timeout=S waits longer."
        ) from error


def _at_etcd(rendezvous: RendezvousSpec, run_id: str, meanwhile: Callable[[], None]) -> Store:
    from jaxpar_launch._etcd import EtcdClient

    endpoints, timeout_s = rendezvous.endpoint, rendezvous.conf.join_timeout
    try:
        return EtcdClient(
            endpoints.split(","),
            prefix=f"/jaxpar/{run_id}/",
            timeout_s=timeout_s,
            access=rendezvous.conf.etcd,
            meanwhile=meanwhile,
        )
    except StoreAuthenticationError as error:
        raise RendezvousError(f"{error}.") from error
    except StoreError as error:
        raise RendezvousError(
            f"no etcd at {endpoints} within {timeout_s:g} s: {error}. Its client port is 2379 as a rule; --rdzv-conf join_timeout=S "
            "waits longer."
        ) from error


def _serve(endpoint: str, token: str) -> StoreServer | None:
    """A server, unless the address is another host's or somebody on this host serves already."""
    host, port = split_address(endpoint, variable="--rdzv-endpoint")
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        return StoreServer(str(address), port, token=token)
    except OSError:  # also a name that does not exist yet: that of a pod which is still to be made
        return None


def secret_of(run_id: str, given: str | None) -> str:
    """The token of a job: the one given, else made of its id, which keeps jobs apart but keeps nobody out."""
    return given or hashlib.sha256(f"jaxpar-launch {run_id}".encode()).hexdigest()


def own_address(endpoint: str, local_addr: str | None) -> str:
    """The address at which other hosts reach this one's workers.

    Raises:
        LaunchSpecError: `--local-addr` is no address of this host.
    """
    if local_addr is not None:
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(local_addr, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
                return str(address[0])
        raise LaunchSpecError(
            f"--local-addr {local_addr} is no address of this host. Leave it out to take the one that leads to {endpoint}."
        )
    host, port = split_address(endpoint.split(",")[0], variable="--rdzv-endpoint")
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connects nothing: asks for the route
        probe.connect(address)
        return str(probe.getsockname()[0])
