"""Reads an epoch on several meshes, as told by the state in the first argument, and prints what came as one JSON object.

Every row: the global batches with their masks, the rows that this process fed, and the state after the second batch.
"""

import json
import sys

import grain
import jax
import numpy as np

import jaxpar
from jaxpar._errors import DesyncError
from jaxpar.data import DataLoader, DistributedSampler, GrainSource, prefetch_to_device
from jaxpar.mesh import DeviceMesh, full_array, get_rank

LENGTH, SIZE = 22, 8
COLUMNS = {"i": np.arange(LENGTH), "pair": np.stack([np.arange(LENGTH)] * 2, 1)}

jaxpar.init_process_group(timeout_s=60, shutdown_timeout_s=10)
state = json.loads(sys.argv[1])
n = jax.device_count()


def mesh_of(shape: tuple[int, ...], axes: tuple[str, ...], order: list[int]) -> DeviceMesh:
    """Over the devices of all processes, in this order."""
    return jaxpar.init_device_mesh(shape, axes, devices=[jax.devices()[i] for i in order])


def whole(item: tuple) -> list:
    """A global batch and its mask, as every process sees them."""
    batch, mask = item
    i, pair, mask = (np.asarray(full_array(x)) for x in (batch["i"], batch["pair"], mask))
    assert (pair == i[:, None]).all()
    return [i.tolist(), mask.tolist()]


def row(dataset, mesh: DeviceMesh, **options) -> dict:
    def make(**more) -> DataLoader:
        loader = DataLoader(dataset, SIZE, mesh=mesh, batch_axes="dp", seed=1, **options, **more)
        if state:
            loader.load_state_dict(state)
        return loader

    loader = make()
    batches, states = zip(*((whole(item), loader.state_dict()) for item in loader), strict=True)
    fed = [batch["i"].tolist() for batch, _ in make(to_devices=False)]
    return {"batches": batches, "fed": fed, "state": states[1]}


def sampled(mesh: DeviceMesh) -> list:
    """By DistributedSampler.batches, read by hand, and a stream on its way to the devices."""
    sampler = DistributedSampler(LENGTH, seed=1)
    if state:
        sampler.load_state_dict(state)
    host = (({k: x[rows.indices] for k, x in COLUMNS.items()}, rows.mask) for rows in sampler.batches(SIZE))
    with prefetch_to_device(host, mesh, "dp") as batches:
        return [whole(item) for item in batches]


def desync(mesh: DeviceMesh) -> str:
    """The error of processes that have not resumed from the same state."""
    try:
        next(iter(DataLoader(COLUMNS, SIZE, mesh=mesh, batch_axes="dp", seed=get_rank())))
    except DesyncError as error:
        return str(error)
    return "no error"


straight = list(range(n))
interleaved = straight[::2] + straight[1::2]
rows = {
    "dp": row(COLUMNS, mesh_of((n,), ("dp",), straight)),
    "dp, the last process first": row(COLUMNS, mesh_of((n,), ("dp",), straight[::-1])),
    "dp, processes in turn": row(COLUMNS, mesh_of((n,), ("dp",), interleaved)),
    "dp, tp over processes": row(COLUMNS, mesh_of((n // 2, 2), ("dp", "tp"), interleaved)),
    "tp, dp": row(COLUMNS, mesh_of((2, n // 2), ("tp", "dp"), straight)),
    "grain": row(
        GrainSource(
            grain.MapDataset.source([{"i": np.array(i), "pair": np.full(2, i)} for i in range(LENGTH)])
        ),
        mesh_of((n,), ("dp",), straight),
    ),
    "sampler": {"batches": sampled(mesh_of((n,), ("dp",), straight))},
}
if jax.process_count() > 1:
    rows["desync"] = desync(mesh_of((n,), ("dp",), straight))
print("ROWS " + json.dumps({"rank": get_rank(), **rows}), flush=True)
