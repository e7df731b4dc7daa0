"""Which transport serves the ranks of a pipeline.

one process                      the runtime copies between devices
several, "auto" or "pull"        a transfer server in each process, where the platform has one
several, "permute"               a collective program for each message
CPU, a stage over processes      "auto" is "permute": collectives inside the stage may occupy every thread of the runtime's pool
                                 until their peers come, and a server needs one to give those what they wait for
"""

import functools
from typing import Literal, get_args

from jax.sharding import Mesh

from jaxpar._errors import ParallelizeError
from jaxpar.mesh import all_gather_object
from jaxpar.mesh._process_group import current_group
from jaxpar.pp._ranks import is_spread
from jaxpar.pp._transport._in_process import DeviceCopies
from jaxpar.pp._transport._permute import Permutes
from jaxpar.pp._transport._protocol import Transport
from jaxpar.pp._transport._pull import Pulls, start_server

TransportName = Literal["auto", "pull", "permute"]


def check_transport(name: str) -> None:
    """Refuses a transport that there is not.

    Raises:
        ParallelizeError: the name is unknown.
    """
    if name not in get_args(TransportName):
        raise ParallelizeError(
            f"pipeline: transport={name!r} is none of {get_args(TransportName)}. Leave it out: 'auto' takes what the platform has."
        )


def transport_between(meshes: tuple[Mesh, ...], name: TransportName) -> Transport:
    """A transport for these ranks. If they lie on several processes, all of those must call it.

    Raises:
        ParallelizeError: `name` is "pull", and a process cannot serve.
    """
    if not is_spread(meshes):
        return DeviceCopies()
    timeout_s = current_group().timeout_s
    if name == "auto" and _could_starve(meshes):
        name = "permute"
    addresses = _addresses() if name != "permute" else [None]
    missing = [rank for rank, address in enumerate(addresses) if address is None]
    if not missing:
        return Pulls(meshes, [str(address) for address in addresses], timeout_s=timeout_s)
    if name == "pull":
        raise ParallelizeError(
            f"pipeline: transport='pull' needs jax.experimental.transfer, which the devices of processes {missing} do not "
            f"offer. Write transport='permute', or leave it out."
        )
    return Permutes(meshes, timeout_s=timeout_s)


def _could_starve(meshes: tuple[Mesh, ...]) -> bool:
    """Whether processes that wait for each other inside a stage serve what others wait for, on one small pool of threads."""
    of_ranks = [tuple(device.process_index for device in mesh.devices.flat) for mesh in meshes]
    is_cpu = meshes[0].devices.flat[0].platform == "cpu"
    return is_cpu and any(len(set(of_rank)) > 1 for of_rank in of_ranks) and len(set(of_ranks)) > 1


@functools.cache
def _addresses() -> list[str | None]:
    """Where every process serves; asked once."""
    server = start_server()
    return all_gather_object(None if server is None else server.address())
