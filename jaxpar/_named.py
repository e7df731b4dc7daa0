"""The arrays of a model or an optimizer by dotted name, in the shape that the user gave them.

blocks.0.kernel            f32[4096, 1024]
opt_state.0.mu.odd         stored f32[16], named f32[5, 3]: padding never shows
dropout.rngs.key           a random key: its data, u32[2]
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxpar._errors import ParallelizeError
from jaxpar._pytree import leaf_name
from jaxpar._record import is_flat, logical_shape
from jaxpar._spec import entries

Variable = nnx.Variable[Any]


@dataclass(frozen=True)
class NamedArray:
    """One array of a variable.

    Args:
        name: dotted name.
        variable: the variable that holds it; almost always nothing else.
        value: as stored: an array, `jax.ShapeDtypeStruct` or Python number.
        position: which leaf of the variable's value it is.
    """

    name: str
    variable: Variable
    value: Any
    position: int = 0

    @property
    def is_key(self) -> bool:
        """Whether it is an array of random keys."""
        return hasattr(self.value, "dtype") and jnp.issubdtype(self.value.dtype, jax.dtypes.prng_key)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on the host: without padding, and of a key's data."""
        if self.is_key:
            return jax.eval_shape(jax.random.key_data, self.value).shape
        return tuple(logical_shape(self.variable)) if is_flat(self.variable) else np.shape(self.value)

    @property
    def dtype(self) -> np.dtype:
        """The dtype on the host."""
        if self.is_key:
            return jax.eval_shape(jax.random.key_data, self.value).dtype
        return dtype_of(self.value)

    def assign(self, value: Any) -> None:
        """Puts another array into its place."""
        leaves, treedef = jax.tree.flatten(self.variable.get_value())
        leaves[self.position] = value
        self.variable.set_value(jax.tree.unflatten(treedef, leaves))


def named_arrays(module: nnx.Pytree, kind: type[Variable] = nnx.Variable) -> list[NamedArray]:
    """All arrays of the variables of a kind; a variable that is reached twice counts once, under its first name.

    Raises:
        ParallelizeError: two arrays have one name.
    """
    found = [
        array
        for path, node in nnx.iter_graph(module)
        if isinstance(node, kind)
        for array in _arrays_of(dotted(path), node)
    ]
    names = [array.name for array in found]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ParallelizeError(
            f"{type(module).__name__} has two arrays of the name {twice[0]!r}: a dict key with a dot in it reads like an "
            f"attribute of an attribute. Rename one of them."
        )
    return found


def check_no_bare_arrays(module: nnx.Pytree) -> None:
    """Raises ParallelizeError if the module holds an array outside a variable: it could not be assigned."""
    bare = [dotted(path) for path, node in nnx.iter_graph(module) if isinstance(node, jax.Array)]
    if bare:
        raise ParallelizeError(
            f"{type(module).__name__} holds arrays outside variables: {bare}. State is read from and loaded into variables. "
            f"Write self.{bare[0].split('.')[-1]} = nnx.Variable(...)."
        )


def dtype_of(x: Any) -> np.dtype:
    """The dtype of an array or number, without reading it."""
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


def splitting_axes(sharding: Any) -> tuple[str, ...]:
    """The mesh axes that split an array of this sharding, in mesh order; none if it is not on a mesh."""
    if not isinstance(sharding, NamedSharding):
        return ()
    used = {axis for names in entries(sharding.spec, len(sharding.spec)) for axis in names}
    return tuple(axis for axis in sharding.mesh.axis_names if axis in used)


def _arrays_of(name: str, variable: Variable) -> list[NamedArray]:
    leaves = jax.tree_util.tree_flatten_with_path(variable.get_value())[0]
    return [
        NamedArray(".".join(filter(None, (name, leaf_name(path)))), variable, x, position)
        for position, (path, x) in enumerate(leaves)
    ]


def dotted(path: tuple[Any, ...]) -> str:
    """A path of Flax as a dotted name."""
    return ".".join(str(part) for part in path)
