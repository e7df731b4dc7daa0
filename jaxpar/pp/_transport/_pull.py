"""Between processes: each serves what it sends, and pulls what it wants (`jax.experimental.transfer`).

process of rank 0    server.await_pull(number, parts)            at once, also while the parts are still computed
process of rank 1    connection.pull(number, shapes)             at once; what depends on the parts waits, not Python

Both find the same number by counting the moves between two ranks, and mix in what is moved: shapes, dtypes, and what it is. So
neither a wrong order nor a batch of another shape is taken for something else: it never comes, and the deadline names it.
"""

import collections
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import transfer
from jax.sharding import Mesh, SingleDeviceSharding

from jaxpar.mesh._address import address_at
from jaxpar.mesh._devices import Device
from jaxpar.mesh._own_host import own_host
from jaxpar.pp._transport._arrivals import Arrivals, Expected
from jaxpar.pp._transport._protocol import Arrival, Hop, Leaves
from jaxpar.pp._transport._shards import joined, local_devices, parts_of


class Pulls:
    """Every process is a server to the others.

    Args:
        meshes: of each rank.
        addresses: of the server of each process.
        timeout_s: how long a wait may take.
    """

    def __init__(self, meshes: tuple[Mesh, ...], addresses: Sequence[str], *, timeout_s: float) -> None:
        self._meshes, self._addresses = meshes, addresses
        self._arrivals = Arrivals(timeout_s)
        self._counts: collections.Counter[tuple[int, int]] = collections.Counter()
        self._connections: dict[int, Any] = {}

    def move(self, values: Leaves | None, hop: Hop, wanted: Sequence[jax.ShapeDtypeStruct]) -> Arrival:
        """Offers, or pulls; parts between two devices of this process are copied."""
        self._counts[hop.source, hop.target] += 1
        name = f"{hop} {self._counts[hop.source, hop.target]} {[(w.shape, w.dtype) for w in wanted]}"
        meshes = (self._meshes[hop.source], self._meshes[hop.target])
        pairs = list(zip(*(mesh.devices.flat for mesh in meshes), strict=True))
        me = jax.process_index()
        parts = [parts_of(x) for x in values or ()]
        for peer, targets in _by_peer(pairs, me).items():
            offered = [of_leaf[source] for of_leaf in parts for source, _ in targets]
            start_server().await_pull(_number(name, me, peer), offered)
        received: list[dict[Device, jax.Array]] = [{} for _ in wanted]
        for source, target in pairs:
            if source.process_index == target.process_index == me:
                for mine, of_leaf in zip(received, parts, strict=True):
                    mine[target] = jax.device_put(of_leaf[source], target)
        peers = _by_peer([(target, source) for source, target in pairs], me)
        for peer, sources in peers.items():
            specs = [_on(target, like) for like in wanted for target, _ in sources]
            pulled = iter(self._connection(peer).pull(_number(name, peer, me), specs))
            for mine in received:
                mine.update({target: next(pulled) for target, _ in sources})
        here = local_devices(meshes[1])
        arrays = [joined(like, [mine[d] for d in here]) for like, mine in zip(wanted, received, strict=True)]
        if peers:
            self._arrivals.expect(Expected(hop, tuple(peers), arrays))
        return lambda: arrays

    def wait(self, values: Leaves | None = None) -> None:
        """Waits for arrays, or for all that was pulled."""
        self._arrivals.wait(values)

    def _connection(self, peer: int) -> Any:
        if peer not in self._connections:
            self._connections[peer] = start_server().connect(self._addresses[peer])
        return self._connections[peer]


@functools.cache
def start_server() -> Any:
    """The transfer server of this process; started once."""
    client = jax.local_devices()[0].client
    host = own_host()
    return transfer.start_transfer_server(client, address_at(host, 0), [address_at(host, 0)])


Pair = tuple[Device, Device]


def _by_peer(pairs: Sequence[Pair], me: int) -> dict[int, list[Pair]]:
    """The pairs of a device of this process and one of another, by the other process."""
    found: dict[int, list[Pair]] = {}
    for mine, theirs in pairs:
        if mine.process_index == me != theirs.process_index:
            found.setdefault(theirs.process_index, []).append((mine, theirs))
    return found


def _number(name: str, source: int, target: int) -> int:
    """What both processes call one message: 63 bits, so that two of a job never meet."""
    digest = hashlib.blake2b(f"{name} {source} {target}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _on(device: Device, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What one device takes of an array."""
    assert like.sharding is not None
    return jax.ShapeDtypeStruct(
        like.sharding.shard_shape(like.shape), like.dtype, sharding=SingleDeviceSharding(device)
    )
