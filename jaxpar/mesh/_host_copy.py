"""State kept in host memory over the loss of a worker: copied out of JAX, and later sent from a survivor to all.

    keep      replicated jax.Array --> numpy, on every process           a part that only the lost one had cannot be kept
    resume    survivor  bytes, bytes ...  == sum over processes ==>  all     others contribute zeros
              template's shape, dtype, sharding              -->  jax.Array

Bytes, not numbers, are summed, so that what arrives is equal bit for bit: NaN, -0.0, keys and all.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpar._errors import RecoveryError
from jaxpar._pytree import PyTree, leaf_name
from jaxpar.mesh._warm_up import warm_up

_CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class HostCopy:
    """A host copy of a state after `num_steps` steps."""

    num_steps: int
    names: tuple[str, ...]
    leaves: tuple[np.ndarray, ...]


def copy_to_host(num_steps: int, state: PyTree) -> HostCopy:
    """Copies every leaf, or none.

    Raises:
        RecoveryError: a leaf is not whole on every process.
    """
    named = jax.tree_util.tree_flatten_with_path(state)[0]
    if torn := [
        (leaf_name(path), leaf)
        for path, leaf in named
        if isinstance(leaf, jax.Array) and not leaf.is_fully_replicated
    ]:
        name, leaf = torn[0]
        raise RecoveryError(
            f"Recovery.keep: {name} {leaf.shape} is sharded, {leaf.sharding}, as are {len(torn) - 1} more of {len(named)} leaves. Its"
            " parts on a lost process are lost with it. Leave keep out and give resume a checkpoint:"
            " run.resume(state, otherwise=lambda: load(state))."
        )
    return HostCopy(
        num_steps, tuple(leaf_name(path) for path, _ in named), tuple(_host(leaf) for _, leaf in named)
    )


def _host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array):
        return np.array(_data(leaf).addressable_data(0))
    return np.array(leaf)


def _data(leaf: jax.Array) -> jax.Array:
    """Random keys as the numbers they are made of."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def restored(kept: HostCopy | None, template: PyTree, *, source: int) -> PyTree:
    """What process `source` kept, on all processes, each leaf as that of `template` is placed.

    Raises:
        RecoveryError: the template has other leaves than what this process kept.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(template)
    wanted = [_data(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf) for _, leaf in named]
    if kept is not None:
        _check_fits(kept, [leaf_name(path) for path, _ in named], wanted)
    flat = np.zeros(sum(like.size * like.dtype.itemsize for like in wanted), np.uint8)
    if jax.process_index() == source:
        assert kept is not None
        np.concatenate([np.ravel(leaf).view(np.uint8) for leaf in kept.leaves], out=flat)
    flat, start, leaves = _sum_over_processes(flat), 0, []
    for (_, leaf), like in zip(named, wanted, strict=True):
        stop = start + like.size * like.dtype.itemsize
        leaves.append(_placed(flat[start:stop].view(like.dtype).reshape(like.shape), like, leaf))
        start = stop
    return jax.tree.unflatten(structure, leaves)


def _check_fits(kept: HostCopy, names: list[str], wanted: list[Any]) -> None:
    had = [(name, leaf.shape, leaf.dtype) for name, leaf in zip(kept.names, kept.leaves, strict=True)]
    want = [(name, like.shape, like.dtype) for name, like in zip(names, wanted, strict=True)]
    for was, now in zip(had, want, strict=False):
        if was != now:
            raise RecoveryError(
                f"Recovery.resume: {now[0]} is {now[2]}{list(now[1])}, but kept was {was[0]}, {was[2]}{list(was[1])}. Give resume"
                " and keep the same state: nnx.state((model, optimizer)) in both."
            )
    if len(had) != len(want):
        raise RecoveryError(
            f"Recovery.resume: the state has {len(want)} leaves, but {len(had)} were kept. Give resume and keep the same state:"
            " nnx.state((model, optimizer)) in both."
        )


def _placed(host: np.ndarray, like: Any, leaf: Any) -> Any:
    if not isinstance(like, jax.Array):
        return host.item() if isinstance(leaf, bool | int | float | complex) else host
    placed = jax.make_array_from_callback(host.shape, like.sharding, lambda index: host[index])
    return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else placed


def _sum_over_processes(flat: np.ndarray) -> np.ndarray:
    """The sum of all processes' bytes, of which all but one's are zero: an all-reduce over one device of each."""
    devices = [
        next(device for device in jax.devices() if device.process_index == rank)
        for rank in range(jax.process_count())
    ]
    mesh = jax.sharding.Mesh(np.array(devices), ("process",))
    warm_up(mesh)
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x[0], "process"),
            mesh=mesh,
            in_specs=P("process"),
            out_specs=P(),
            check_vma=True,
        )
    )
    sharding = jax.sharding.NamedSharding(mesh, P("process"))
    for start in range(0, flat.size, _CHUNK_BYTES):
        chunk = flat[start : start + _CHUNK_BYTES]
        shape = (len(devices), chunk.size)
        rows = jax.make_array_from_callback(shape, sharding, lambda _, chunk=chunk: chunk[None])
        flat[start : start + _CHUNK_BYTES] = np.asarray(total(rows).addressable_data(0))
    return flat
