"""An abstract optimizer's state lies where the concrete one's would."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxpar.fsdp import fully_shard
from jaxpar.fsdp._abstract_state import follow_parameters
from jaxpar.mesh import init_device_mesh


class Model(nnx.Module):
    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(8, 4, rngs=nnx.Rngs(i)) for i in range(2)])
        self.odd = nnx.Param(jnp.ones((5, 3)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[0](x)


def shardings(optimizer: nnx.Optimizer) -> dict[str, tuple[tuple[int, ...], jax.sharding.Sharding]]:
    state = nnx.to_flat_state(nnx.state(optimizer, nnx.OptState))
    return {
        str(path): (x.get_value().shape, x.get_value().sharding) for path, x in state if x.get_value().ndim
    }


def test_moments_lie_as_those_of_the_concrete_optimizer() -> None:
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    tx = optax.adamw(1e-3)
    concrete = fully_shard(Model(), mesh, units="layers.*", pad_above_bytes=0)
    abstract = fully_shard(nnx.eval_shape(Model), mesh, units="layers.*", pad_above_bytes=0)
    optimizer = nnx.eval_shape(lambda model: nnx.Optimizer(model, tx, wrt=nnx.Param), abstract)
    follow_parameters(optimizer, abstract)
    expected = shardings(nnx.Optimizer(concrete, tx, wrt=nnx.Param))
    assert len(expected) == 2 * 5
    assert shardings(optimizer) == expected
