"""Between processes: for each message one program on the devices of both ranks, a ppermute from the first half to the second.

    devices of the source | of the target       place 0 -> n, 1 -> n + 1, ...       f32[2 n, ...], a part on each device

The runtime matches such programs by their order alone, so all processes run them in the order of the program. On CPU a program
occupies its thread until the neighbour has come; there they have a thread of their own, in which both sides meet before the
first program of each pair, as its connections wait 30 s and no longer.
"""

import collections
import concurrent.futures
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar._errors import ProcessGroupError, WorkerLostError
from jaxpar.mesh._devices import Device
from jaxpar.mesh._mesh import auto_mesh
from jaxpar.mesh._warm_up import run_together
from jaxpar.pp._transport._arrivals import Arrivals, Expected
from jaxpar.pp._transport._protocol import Arrival, Hop, Leaves
from jaxpar.pp._transport._shards import joined, local_devices, parts_of

_AXES = ("side", "place")


class Permutes:
    """Collective programs on pairs of ranks.

    Args:
        meshes: of each rank.
        timeout_s: how long a wait may take.
    """

    def __init__(self, meshes: tuple[Mesh, ...], *, timeout_s: float) -> None:
        self._meshes, self._timeout_s = meshes, timeout_s
        self._arrivals = Arrivals(timeout_s)
        self._under_way: collections.deque[tuple[concurrent.futures.Future[Leaves], Hop]] = (
            collections.deque()
        )
        is_cpu = meshes[0].devices.flat[0].platform == "cpu"
        self._run: Callable[..., concurrent.futures.Future[Leaves]] = _Lane().run if is_cpu else _at_once

    def move(self, values: Leaves | None, hop: Hop, wanted: Sequence[jax.ShapeDtypeStruct]) -> Arrival:
        """Runs the program, or has it run; both sides do."""
        sides = (self._meshes[hop.source], self._meshes[hop.target])
        future = self._run(functools.partial(_permuted, sides, values, list(wanted), self._timeout_s))
        self._under_way.append((_end_of(future), hop))
        peers = {d.process_index for d in sides[0].devices.flat} - {jax.process_index()}

        def arrival() -> Leaves:
            arrays = self._result(future, hop)
            self._arrivals.expect(Expected(hop, tuple(sorted(peers)), arrays))
            return arrays

        return arrival

    def wait(self, values: Leaves | None = None) -> None:
        """Waits for arrays; or for all that was moved, so that other programs may use the same devices in any order."""
        if values is None:
            while self._under_way:
                future, hop = self._under_way.popleft()
                self._result(future, hop)
        self._arrivals.wait(values)

    def _result(self, future: "concurrent.futures.Future[Leaves]", hop: Hop) -> Leaves:
        try:
            return future.result(self._timeout_s)
        except (TimeoutError, _NotConnectedError) as error:
            source, target = (
                sorted({d.process_index for d in self._meshes[rank].devices.flat})
                for rank in (hop.source, hop.target)
            )
            raise ProcessGroupError(
                f"pipeline: {hop.what}, did not come within {self._timeout_s:g} s: from rank {hop.source} of the "
                f"pipeline (processes {source}) to rank {hop.target} (processes {target}), and this is process "
                f"{jax.process_index()}. Look at the output of those. If they are only slow, write "
                f"init_process_group(timeout_s=...)."
            ) from error.__cause__
        except jax.errors.JaxRuntimeError as error:
            raise ProcessGroupError(
                f"pipeline: another process of the pipeline is lost, as seen from process {jax.process_index()}. Under way: "
                f"{hop.what}, from rank {hop.source} to rank {hop.target}. {error}"
            ) from error


def _permuted(
    sides: tuple[Mesh, Mesh],
    values: Leaves | None,
    wanted: Sequence[jax.ShapeDtypeStruct],
    timeout_s: float,
) -> Leaves:
    """The values at the target; nothing in a process that has no device there."""
    is_cpu = sides[0].devices.flat[0].platform == "cpu"
    if is_cpu:
        # Else the program would wait in the runtime's pool, and keep others out of it.
        jax.block_until_ready(values)
    mesh = auto_mesh(np.stack([side.devices.reshape(-1) for side in sides]), _AXES)
    if is_cpu:
        _connect(mesh, timeout_s)
    whole = NamedSharding(mesh, PartitionSpec(_AXES))
    parts = [parts_of(x) for x in values] if values is not None else [{} for _ in wanted]
    given, targets = [], set(sides[1].devices.flat)
    for like, of_leaf in zip(wanted, parts, strict=True):
        shape = _part_shape(like)
        blank = functools.partial(_zeros, shape, like.dtype)
        mine = [
            blank(device) if device in targets else of_leaf[device].reshape(shape)
            for device in local_devices(mesh)
        ]
        like_whole = jax.ShapeDtypeStruct((shape[0] * mesh.size, *shape[1:]), like.dtype, sharding=whole)
        given.append(joined(like_whole, mine))
    moved = [parts_of(x) for x in _program(mesh)(given)]
    here = local_devices(sides[1])
    return [
        joined(like, [of_leaf[device].reshape(_own_shape(like)) for device in here])
        for like, of_leaf in zip(wanted, moved, strict=True)
    ]


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh) -> Any:
    def run(xs: Leaves) -> Leaves:
        return [jax.lax.ppermute(x, "side", [(0, 1)]) for x in xs]

    spec = PartitionSpec(_AXES)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(spec,), out_specs=spec))


@functools.cache
def _connect(mesh: Mesh, timeout_s: float) -> None:
    """Opens the connections from the first half of the devices to the second, once."""

    def run() -> jax.Array:
        place = jax.lax.axis_index(_AXES).astype("float32")
        return jax.lax.ppermute(place, "side", [(0, 1)]).reshape(1)

    program = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=PartitionSpec(_AXES)))
    source, target = ([device.id for device in side] for side in mesh.devices)
    name = f"the first message of a pipeline from devices {source} to {target}"
    try:
        run_together([program.lower().compile()], mesh, name, timeout_s=timeout_s)
    except WorkerLostError:
        raise
    except ProcessGroupError as error:
        raise _NotConnectedError from error


class _NotConnectedError(Exception):
    """The other side did not come."""


@functools.lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...], dtype: Any, device: Device) -> jax.Array:
    """What a target gives, which nobody reads; made once."""
    return jax.device_put(np.zeros(shape, dtype), device)


def _own_shape(like: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    assert like.sharding is not None
    return like.sharding.shard_shape(like.shape)


def _part_shape(like: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of one device's part; with a dim, to be stacked along."""
    return _own_shape(like) or (1,)


class _Lane:
    """A thread that runs one thing after the other, and does not keep the process from ending."""

    def __init__(self) -> None:
        self._work: Any = queue.SimpleQueue()
        threading.Thread(target=self._loop, daemon=True, name="jaxpar-pipeline").start()

    def run(self, fn: Callable[[], Leaves]) -> "concurrent.futures.Future[Leaves]":
        """Appends; the result comes."""
        future: concurrent.futures.Future[Leaves] = concurrent.futures.Future()
        self._work.put((fn, future, jax.config.jax_enable_x64))  # pyright: ignore[reportAttributeAccessIssue]
        return future

    def _loop(self) -> None:
        while True:
            fn, future, x64 = self._work.get()
            try:
                with jax.enable_x64(x64):
                    future.set_result(fn())
            except BaseException as error:
                future.set_exception(error)


def _end_of(future: "concurrent.futures.Future[Leaves]") -> "concurrent.futures.Future[Leaves]":
    """Comes with the other one, and does not keep its arrays."""
    end: concurrent.futures.Future[Leaves] = concurrent.futures.Future()

    def pass_on(done: "concurrent.futures.Future[Leaves]") -> None:
        error = done.exception()
        if error is None:
            end.set_result([])
        else:
            end.set_exception(error)

    future.add_done_callback(pass_on)
    return end


def _at_once(fn: Callable[[], Leaves]) -> "concurrent.futures.Future[Leaves]":
    future: concurrent.futures.Future[Leaves] = concurrent.futures.Future()
    future.set_result(fn())
    return future
