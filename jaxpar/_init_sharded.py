"""Builds a model directly in its sharded form: nothing is ever whole on one device.

abstract model (shapes)  --parallelize-->  shapes with shardings  --one jitted constructor-->  sharded arrays
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxpar._errors import ParallelizeError
from jaxpar._flat import flatten_and_pad
from jaxpar._module import ModuleT


def init_sharded(model_fn: Callable[[], ModuleT], parallelize: Callable[[ModuleT], Any]) -> ModuleT:
    """Builds `model_fn()` on the devices that `parallelize` says, each device making only what it holds.

    Nothing moves between devices. The values depend on the model's seed and not on the layout.

    Args:
        model_fn: builds the model, such as `lambda: Transformer(config, rngs=nnx.Rngs(0))`; traced, twice.
        parallelize: sets shardings on the model it is given, in place (`DistributedDataParallel(model, mesh)`,
            `fully_shard`, `parallelize_module`). The model is abstract: shapes and dtypes, no values.

    Returns:
        The model with values, its variables sharded as `parallelize` said.

    Raises:
        ParallelizeError: `model_fn` returned no NNX module.

    Example:
        >>> import jaxpar
        >>> from flax import nnx
        >>> from jaxpar.ddp import DistributedDataParallel
        >>> mesh = jaxpar.init_device_mesh((8,), ("dp",))
        >>> model = jaxpar.init_sharded(
        ...     lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)), lambda m: DistributedDataParallel(m, mesh))
        >>> type(model).__name__, len(model.kernel.sharding.device_set)
        ('DDPLinear', 8)
    """
    abstract = nnx.eval_shape(model_fn)
    if not isinstance(abstract, nnx.Module):
        raise ParallelizeError(
            f"model_fn returned {type(abstract).__name__}, not an nnx.Module. Write init_sharded(lambda: Model(config, "
            f"rngs=nnx.Rngs(0)), parallelize): a function that builds the model, not the model."
        )
    parallelize(abstract)
    graphdef, abstract_state = nnx.split(abstract)
    leaves, treedef = jax.tree.flatten(abstract_state)

    def build() -> list[jax.Array]:
        values = jax.tree.leaves(nnx.state(model_fn()))
        return [_as_stored(x, stored) for x, stored in zip(values, leaves, strict=True)]

    values = jax.jit(build, out_shardings=[x.sharding for x in leaves])()
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, values))


def _as_stored(x: jax.Array, stored: Any) -> jax.Array:
    """A value as `parallelize` stores it: in its own shape, or flat and padded."""
    return x if x.shape == stored.shape else flatten_and_pad(x, stored.size)
