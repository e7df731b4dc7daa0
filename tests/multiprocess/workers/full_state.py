"""Full state over processes: what lies here and there is read whole, and loaded into another layout.

argv: a folder, in which rank 0 leaves `state.npz`. Prints one JSON object with what this process found.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar._errors import DesyncError
from jaxpar.fsdp import full_state, fully_shard, load_full_state, sharding_report
from jaxpar.fsdp._full_state import iter_full_state
from jaxpar.mesh import barrier, destroy_process_group, get_rank


class Model(nnx.Module):
    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.wide = nnx.Param(jax.random.normal(rngs.params(), (3, 8)))
        self.odd = nnx.Param(jax.random.normal(rngs.params(), (5, 3), jnp.bfloat16))
        self.gate = nnx.Param(jnp.float32(seed + 0.5))
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.keys = nnx.Variable(jax.random.split(rngs.params(), 4))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def shard(model: Model, mesh: Any, **axes: Any) -> Model:
    """Keys are sharded by hand: nobody else would."""
    data, impl = np.asarray(jax.random.key_data(model.keys[...])), jax.random.key_impl(model.keys[...])
    split = jax.sharding.NamedSharding(mesh.jax_mesh, jax.sharding.PartitionSpec(mesh.axis_names))
    data = jax.make_array_from_callback(data.shape, split, lambda index: data[index])
    model.keys.set_value(jax.random.wrap_key_data(data, impl=impl))
    return fully_shard(model, mesh, pad_above_bytes=0, **axes)


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        x.dtype == other[name].dtype and np.array_equal(x, other[name]) for name, x in one.items()
    )


jaxpar.init_process_group(timeout_s=30)
folder = Path(sys.argv[1])
mesh, hybrid = jaxpar.init_device_mesh((4,), ("dp",)), jaxpar.init_device_mesh((2, 2), ("replica", "dp"))
expected = full_state(Model(0))  # all of it lies here
model = shard(Model(0), mesh)
everywhere = full_state(model, budget_bytes=64)
on_rank_0 = full_state(model, rank0_only=True)
streamed = [name for name, _ in iter_full_state(model, budget_bytes=1)]

if get_rank() == 0:
    np.savez(folder / "state.npz", **{name: x for name, x in on_rank_0.items() if name != "odd"})
barrier("state.npz is written")
with np.load(folder / "state.npz") as saved:
    loaded = dict(saved) | {"odd": everywhere["odd"]}  # NumPy's files know no bf16
again = shard(Model(1), hybrid)
load_full_state(again, loaded)
skewed = shard(Model(1), hybrid, shard_axis="replica", replicate_axis="dp")
load_full_state(skewed, loaded)

optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
optimizer.opt_state[0].mu["odd"].set_value(2 * model.odd.get_value())
moments = full_state(optimizer)
follows = nnx.Optimizer(again, optax.adam(0.1), wrt=nnx.Param)
load_full_state(follows, moments)

try:
    full_state(model, budget_bytes=64 + get_rank())
    desync = ""
except DesyncError as error:
    desync = str(error)

seen = {
    "is whole": equal(everywhere, expected),
    "rank 0 is whole": equal(on_rank_0, expected if get_rank() == 0 else {}),
    "streamed": streamed == list(expected),
    "loaded": equal(full_state(again), expected),
    "loaded over processes": equal(full_state(skewed), expected),
    "is over processes": [
        not x.get_value().is_fully_addressable for x in (model.wide, model.odd, model.keys)
    ],
    "moments": equal(full_state(follows), moments)
    and np.array_equal(moments["opt_state.0.mu.odd"], 2 * expected["odd"]),
    "bytes": sharding_report(model).bytes_per_device,
    "desync": desync,
}
barrier("all have read")
print("SEEN", json.dumps(seen))
destroy_process_group()
