"""FSDP on pytrees, without Flax modules: for Linen, Equinox and plain dicts, inside one's own `jax.shard_map`.

full = unshard(shards, specs, "dp")                gather; the gradient comes back scattered
y = sharded_call(fn, shards, x, specs=..., ...)    gather, call, free; in the backward gather again
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar._after import number_of
from jaxpar._errors import ParallelizeError
from jaxpar._module import manual_axes
from jaxpar._pytree import PyTree, leaf_names
from jaxpar._residuals import is_floating
from jaxpar._spec import entries
from jaxpar.fsdp._policy import MixedPrecisionPolicy
from jaxpar.fsdp._regather import regathering
from jaxpar.fsdp._unshard import DEFAULT_FLATTEN_BELOW_BYTES, Gather

# How a tree of parameters lies: a spec for each leaf, a prefix of such a tree, or one spec for all.
Specs = Any


def unshard(
    tree: PyTree,
    specs: Specs,
    axis: str | Sequence[str],
    policy: MixedPrecisionPolicy | None = None,
    *,
    flatten_below_bytes: int = DEFAULT_FLATTEN_BELOW_BYTES,
) -> PyTree:
    """Makes whole arrays from the shards of all devices of an axis; for use inside `jax.shard_map`.

        before     device r: part r of each leaf      f32[D0 / n, ...]
        after      device r: the whole leaf           [D0, ...] in `policy.param_dtype`; varying, though equal on all
        dual       part r of the sum of all devices' cotangents: a reduce-scatter in `policy.reduce_dtype`

    One all-gather for all leaves smaller than `flatten_below_bytes` (per dtype) and one for each larger leaf; in the
    backward as many reduce-scatters, of those leaves that are differentiated. A leaf whose spec does not name the
    axis is returned as it is.

    Args:
        tree: pytree of arrays, per device.
        specs: `PartitionSpec` of each leaf as a global array; one spec stands for all.
        axis: mesh axis to gather over, or several, the first varying slowest.
        policy: dtypes.
        flatten_below_bytes: whole leaves smaller than this share one flat buffer.

    Raises:
        ParallelizeError: outside `jax.shard_map` over the axis; a spec has the axis on no dim that the leaf has, or
            not as its fastest.

    Source: ZeRO-2 and ZeRO-3 (arXiv 1910.02054), PyTorch's FSDP2 (row F1).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.fsdp import unshard
        >>> mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> loss = lambda w, x: (x @ unshard(w, P("dp"), "dp")).sum()
        >>> step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P("dp"), P("dp")), out_specs=P("dp"))
        >>> jax.jit(step)(jnp.ones((8, 2)), jnp.ones((16, 8)))[0]
        Array([16., 16.], dtype=float32)
    """
    leaves, treedef = jax.tree.flatten(tree)
    gather = _gather("unshard", tree, specs, axis, policy, flatten_below_bytes)
    return jax.tree.unflatten(treedef, gather(leaves, jnp.float32(0))[0])


def sharded_call(
    fn: Callable[..., PyTree],
    tree: PyTree,
    *args: PyTree,
    specs: Specs,
    axis: str | Sequence[str],
    policy: MixedPrecisionPolicy | None = None,
    flatten_below_bytes: int = DEFAULT_FLATTEN_BELOW_BYTES,
) -> PyTree:
    """Calls `fn(full, *args)` on gathered parameters that are not kept for the backward, but gathered again there.

    Forward: the all-gathers of `unshard`. Backward: the same all-gathers, then the gradients of `fn`, then as many
    reduce-scatters. What the backward needs of `args` is kept; what is made of parameters alone (a cast, a
    transpose) is made again.

    Args:
        fn: pure; `fn(full, *args)` with pytrees of arrays in and out. It closes over no differentiated array.
        tree: pytree of shards, per device.
        *args: pytrees of arrays, per device; cast to `policy.param_dtype` if the policy says so.
        specs: as in `unshard`.
        axis: as in `unshard`.
        policy: dtypes.
        flatten_below_bytes: as in `unshard`.

    Returns:
        `fn`'s result, in `policy.output_dtype`.

    Raises:
        ParallelizeError: as `unshard`.

    Source: ZeRO-3 (arXiv 1910.02054), `reshard_after_forward=True` of PyTorch's FSDP2 (row F4).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.fsdp import sharded_call
        >>> mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> layer = lambda w, x: jnp.tanh(x @ w)
        >>> loss = lambda w, x: sharded_call(layer, w, x, specs=P("dp"), axis="dp").sum()
        >>> step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P("dp"), P("dp")), out_specs=P("dp"))
        >>> jax.jit(step)(jnp.zeros((8, 2)), jnp.ones((16, 8)))[0]
        Array([16., 16.], dtype=float32)
    """
    shards, treedef = jax.tree.flatten(tree)
    policy = policy or MixedPrecisionPolicy()
    inputs, args_def = jax.tree.flatten(policy.cast_inputs(args))
    gather = _gather("sharded_call", tree, specs, axis, policy, flatten_below_bytes)
    started = number_of([x for x in inputs if is_floating(x)][:1])
    full, _ = gather(shards, jnp.float32(0), [started])
    structure: list[Any] = []

    def flat(full: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        out = fn(jax.tree.unflatten(treedef, full), *jax.tree.unflatten(args_def, inputs))
        leaves, out_def = jax.tree.flatten(out)
        structure.append(out_def)
        return leaves

    outputs, _ = regathering(flat, gather.again, full, shards, inputs, jnp.float32(0))
    return policy.cast_outputs(jax.tree.unflatten(structure[-1], outputs))


def _gather(
    where: str,
    tree: PyTree,
    specs: Specs,
    axis: str | Sequence[str],
    policy: MixedPrecisionPolicy | None,
    flatten_below_bytes: int,
) -> Gather:
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    missing = [a for a in axes if a not in manual_axes()]
    if missing:
        raise ParallelizeError(
            f"{where}: axis {missing[0]!r} is not manual here (manual axes: {manual_axes()}). Shards are gathered per device: "
            f"call it inside jax.shard_map(..., mesh=mesh) over that axis."
        )
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    per_leaf = jax.tree.broadcast(specs, tree, is_leaf=is_spec)
    flat_specs = jax.tree.leaves(per_leaf, is_leaf=is_spec)
    named = zip(leaf_names(tree), jax.tree.leaves(tree), flat_specs, strict=True)
    return Gather(
        dims=tuple(_dim(where, name or "tree", x, spec, axes) for name, x, spec in named),
        axes=tuple(a for a in axes if jax.lax.axis_size(a) > 1),
        policy=policy or MixedPrecisionPolicy(),
        flatten_below_bytes=flatten_below_bytes,
    )


def _dim(where: str, name: str, x: jax.Array, spec: PartitionSpec, axes: tuple[str, ...]) -> int | None:
    found = [dim for dim, names in enumerate(entries(spec, x.ndim)) if set(axes) & set(names)]
    if not found:
        return None
    if len(found) > 1 or found[0] >= x.ndim or entries(spec, x.ndim)[found[0]][-len(axes) :] != axes:
        raise ParallelizeError(
            f"{where}: {name} has the spec {spec}, of which {axes} cannot be gathered: the axes must stand together on one dim of "
            f"{list(x.shape)}, fastest of all there. Write a spec such as {PartitionSpec(axes[0] if len(axes) == 1 else axes)}."
        )
    return found[0]
