"""Splits one dim of a parameter over one more mesh axis, beside what shards it already.

    kernel f32[8, 16]   P()             --split dim 1 over tp-->   P(None, "tp")
    fully sharded       P("dp", None)   --split dim 0 over tp-->   P(("tp", "dp"), None)

On the same dim the tensor-parallel axis varies slowest, in whatever order the two were asked for: each rank of `tp` owns
a contiguous range of rows, and `fully_shard` cuts that range.
"""

import dataclasses
import math
from typing import Any

from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar._errors import ParallelizeError
from jaxpar._record import KEY, record_of
from jaxpar._spec import as_spec, entries
from jaxpar.mesh import MeshLike, as_jax_mesh
from jaxpar.mesh._place import put

Variable = nnx.Variable[Any]


def split_variable(name: str, variable: Variable, dim: int, axis: str, mesh: MeshLike) -> None:
    """Shards dim `dim` of a parameter over `axis`, in place. Abstract parameters get the sharding only.

    Raises:
        ParallelizeError: the axis splits the parameter already, the dim does not divide, or `fully_shard` has stored
            the parameter flat.
    """
    x, record = variable.get_value(), record_of(variable)
    if record is not None and record.shape is not None:
        raise ParallelizeError(
            f"parallelize_module: {name}, {x.dtype}{list(record.shape)}, was stored flat by fully_shard, since none of its "
            f"dims divides by the ranks of {record.axes}: no dim is left to split over {axis!r}. Call parallelize_module "
            f"first, or fully_shard(..., ignored_params=[{name!r}])."
        )
    jax_mesh = as_jax_mesh(mesh)
    used = entries(_spec_on(x, jax_mesh), x.ndim)
    if any(axis in names for names in used):
        raise ParallelizeError(
            f"parallelize_module: {name} is split over {axis!r} already ({as_spec(used)}). Give each module one style, in one "
            f"call of parallelize_module."
        )
    dim %= x.ndim
    inner = record.axes if record is not None else ()
    outer = tuple(a for a in used[dim] if a not in inner)
    names = (*outer, axis, *(a for a in used[dim] if a in inner))
    _check_divides(name, x, dim, names, jax_mesh.shape)
    used[dim] = names
    variable.set_value(put(x, NamedSharding(jax_mesh, as_spec(used))))
    if record is not None and record.dim is not None and record.dim % x.ndim == dim:
        variable.set_metadata(KEY, dataclasses.replace(record, size=record.size // jax_mesh.shape[axis]))


def _spec_on(x: Any, mesh: Any) -> PartitionSpec:
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding.spec
    return PartitionSpec()


def _check_divides(name: str, x: Any, dim: int, names: tuple[str, ...], sizes: Any) -> None:
    num_parts = math.prod(sizes[axis] for axis in names)
    if x.shape[dim] % num_parts:
        padded = -(-x.shape[dim] // num_parts) * num_parts
        parts = " x ".join(f"{axis}={sizes[axis]}" for axis in names)
        raise ParallelizeError(
            f"parallelize_module: dim {dim} of {name}, {x.dtype}{list(x.shape)}, does not divide into {num_parts} parts "
            f"({parts}): {x.shape[dim]} % {num_parts} = {x.shape[dim] % num_parts}. Every rank holds the same number of rows. "
            f"Make the dim {padded} (a padded vocabulary: tp.cross_entropy(..., vocab_size={x.shape[dim]})), or take a smaller axis."
        )
