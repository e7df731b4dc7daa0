"""Arrays of a model as a stream of whole host arrays, whatever lies where: read here, or gathered over processes.

blocks.0.kernel  device 0: [w 0:2]  device 1: [w 2:4]   ->   ("blocks.0.kernel", [w 0:4]), then the next name
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxpar._errors import JaxparError
from jaxpar._named import NamedArray
from jaxpar.mesh._fingerprint import assert_same_everywhere
from jaxpar.mesh._pieces import needs_gather, read
from jaxpar.mesh._process_group import get_rank
from jaxpar.mesh._stream import Reading, read_all
from jaxpar.mesh._warm_up import warm_up

DEFAULT_BUDGET_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Asker:
    """Who reads, for messages.

    Args:
        name: of the public function.
        owner: the class of the model.
        error: what is raised for a mistake.
        call: a line of the user's, with `model`.
        filled_by: the other way to give an abstract model its values.
    """

    name: str
    owner: str
    error: type[JaxparError]
    call: str
    filled_by: str


def host_arrays(
    arrays: Sequence[NamedArray], asker: Asker, *, budget_bytes: int, rank0_only: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays in order, each whole and in its own shape; every process must run it to its end.

    Args:
        arrays: of a model, the same on every process.
        asker: for messages.
        budget_bytes: what gathered slices take on a device, and what is on its way to the host, at once.
        rank0_only: the other processes take part in the gathers and get nothing.
    """
    _check(arrays, asker, budget_bytes)
    if any(needs_gather(a.value) for a in arrays):
        _agree(arrays, asker, budget_bytes, rank0_only=rank0_only)
    return _stream(arrays, budget_bytes, keep=not rank0_only or get_rank() == 0)


def _check(arrays: Sequence[NamedArray], asker: Asker, budget_bytes: int) -> None:
    if budget_bytes < 1:
        raise asker.error(
            f"{asker.name}: budget_bytes={budget_bytes} lets nothing through. Write the bytes that may be gathered on a device "
            f"at once, such as budget_bytes=2**28, or leave it out."
        )
    abstract = [a.name for a in arrays if isinstance(a.value, jax.ShapeDtypeStruct)]
    if abstract:
        raise asker.error(
            f"{asker.name}: {abstract} of {asker.owner} have shapes but no values yet. Build the model with "
            f"jaxpar.init_sharded(model_fn, parallelize), or fill it with {asker.filled_by}."
        )
    away = [
        a.name for a in arrays if isinstance(a.value, jax.Array) and not a.value.sharding.addressable_devices
    ]
    if away:
        raise asker.error(
            f"{asker.name}: {away[0]} and {len(away) - 1} other arrays of {asker.owner} lie on the devices of other processes "
            f"only: they belong to other stages of a pipeline. Write, in every process, with jaxpar.pp.gathered(model, mesh): "
            f"{asker.call}."
        )


def _agree(arrays: Sequence[NamedArray], asker: Asker, budget_bytes: int, *, rank0_only: bool) -> None:
    """Every process must gather the same arrays in the same pieces, and be here."""
    gathered = [a for a in arrays if needs_gather(a.value)]
    names = "\n".join(f"{a.name} {a.dtype}{list(a.shape)} {a.value.sharding}" for a in gathered)
    facts = {
        "arrays": hashlib.sha256(names.encode()).hexdigest(),
        "options": f"{budget_bytes=}, {rank0_only=}",
    }
    assert_same_everywhere(asker.name, facts)
    for mesh in dict.fromkeys(a.value.sharding.mesh for a in gathered):
        warm_up(mesh)


def _stream(
    arrays: Sequence[NamedArray], budget_bytes: int, *, keep: bool
) -> Iterator[tuple[str, np.ndarray]]:
    readings = (_reading(array, budget_bytes, keep=keep) for array in arrays)
    hosts = read_all(readings, budget_bytes)
    for array in arrays:
        host = next(hosts)
        if host is not None:
            yield array.name, host.reshape(-1)[: _size(array)].reshape(array.shape)
        del host  # or it would stay while the next but one is read; `zip` would keep it, too


def _reading(array: NamedArray, budget_bytes: int, *, keep: bool) -> Reading:
    x = jax.random.key_data(array.value) if array.is_key else array.value
    if isinstance(x, jax.Array):
        return read(x, budget_bytes=budget_bytes, keep=keep)
    host = np.array(x) if keep else None
    return Reading((), lambda: host)


def _size(array: NamedArray) -> int:
    return int(np.prod(array.shape, dtype=np.int64))
