"""Weights over processes: gathered into one export, read by each in its own slices; `safetensors_files.py FOLDER`.

Prints one JSON object with what this process found.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[2] / "checkpoint"))
from rig import Model  # pyright: ignore[reportMissingImports]

import jaxpar
from jaxpar._named import NamedArray, named_arrays
from jaxpar.checkpoint import CheckpointError, load_safetensors, save_safetensors
from jaxpar.fsdp import full_state, fully_shard
from jaxpar.mesh import barrier, destroy_process_group


def sharded(seed: int) -> Model:
    """Over all devices of all processes."""
    mesh = jaxpar.init_device_mesh((8,), ("dp",))
    return fully_shard(Model(rngs=nnx.Rngs(seed)), mesh, units="blocks.*", pad_above_bytes=0)


def in_stages(seed: int) -> Model:
    """A block on each process, as the stages of a pipeline lie after its first step."""
    model = Model(rngs=nnx.Rngs(seed))
    for rank, block in enumerate(model.blocks):
        stage = jax.sharding.Mesh(jax.devices()[4 * rank : 4 * rank + 4], ("dp",))
        place = jax.sharding.NamedSharding(stage, jax.sharding.PartitionSpec())
        for _, variable in nnx.iter_graph(block):
            if isinstance(variable, nnx.Param):
                host = np.asarray(variable.get_value())
                variable.set_value(
                    jax.make_array_from_callback(
                        host.shape, place, lambda index, host=host: host[index], dtype=host.dtype
                    )
                )
    return model


def is_here(array: NamedArray) -> bool:
    return bool(array.value.sharding.addressable_devices)


def weights(model: nnx.Module) -> dict[str, np.ndarray]:
    return {name: x for name, x in full_state(model).items() if "rngs" not in name}


def is_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(x, other[name]) for name, x in one.items())


def error_of(model: nnx.Module, folder: Path) -> str:
    try:
        save_safetensors(model, folder)
    except CheckpointError as error:
        return str(error)
    return ""


jaxpar.init_process_group(timeout_s=60)
folder = Path(sys.argv[1])
expected = weights(Model(rngs=nnx.Rngs(0)))
save_safetensors(sharded(0), folder / "fsdp", max_shard_bytes=600, budget_bytes=512)
model = sharded(1)
load_safetensors(model, folder / "fsdp")
seen: dict[str, object] = {"fsdp": is_equal(weights(model), expected)}
seen["no disk"] = error_of(model, folder / "a file")

stages = in_stages(1)
seen["without gathered"] = error_of(stages, folder / "stages")
load_safetensors(stages, folder / "fsdp")
here = [array for array in named_arrays(stages) if array.name in expected and is_here(array)]
seen["stages"] = is_equal(
    {array.name: np.asarray(array.value) for array in here},
    {array.name: expected[array.name] for array in here},
)
seen["names here"] = [array.name for array in here]
barrier("all have read")
print("SEEN", json.dumps(seen))
destroy_process_group()
