"""Sums gradients over mesh axes, bucket by bucket: after the backward pass, or inside it.

    after    grads = backward(...);  bucketed_all_reduce(grads)      all buckets, one after the other
    inside   params' = reduce_in_backward(params)                    forward: identity, no communication
                                                                     backward: a bucket is reduced where its
                                                                     last gradient is ready

Either way the compiled program has exactly one all-reduce per bucket.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar._after import number_of
from jaxpar._errors import ParallelizeError
from jaxpar._module import vary, varying_axes
from jaxpar._pytree import PyTree
from jaxpar.ddp._buckets import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_FIRST_BUCKET_BYTES,
    Bucket,
    Group,
    assign_buckets,
    bucket_limits,
)
from jaxpar.ddp._grad_bucket import GradBucket
from jaxpar.ddp._hooks import CommHook, StatefulHook, allreduce_hook, check_hook, check_summed

Hook = CommHook | StatefulHook


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced: bucket sizes, hook, and which arrays share a flat buffer.

    Args:
        bucket_bytes: a bucket is closed once it holds this much, per device; a tuple gives each bucket's size.
        first_bucket_bytes: the same for the first bucket, whose gradients are ready first.
        comm_hook: what goes over the wire.
        flatten_below_bytes: arrays smaller than this share one flat buffer.

    Raises:
        ParallelizeError: a bucket size is not positive, or the hook is none.
    """

    bucket_bytes: int | tuple[int, ...] = DEFAULT_BUCKET_BYTES
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES
    comm_hook: Hook = allreduce_hook
    flatten_below_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        bucket_limits(self.bucket_bytes, self.first_bucket_bytes)
        check_hook(self.comm_hook)

    def buckets(
        self, leaves: Sequence[jax.Array], axes: Sequence[tuple[str, ...]], order: Sequence[int] | None = None
    ) -> tuple[Bucket, ...]:
        """Returns the buckets of `leaves` (arrays, per device), each reduced over its axes."""
        return assign_buckets(
            [x.size * x.dtype.itemsize for x in leaves],
            [
                Group(tuple(a), str(x.dtype), tuple(sorted(varying_axes(x) - set(a))))
                for a, x in zip(axes, leaves, strict=True)
            ],
            order=order,
            bucket_bytes=self.bucket_bytes,
            first_bucket_bytes=self.first_bucket_bytes,
        )

    def init_states(self, leaves: Sequence[Any]) -> tuple[PyTree, ...]:
        """Returns the hook's state for each leaf, before the first step; empty for stateless hooks."""
        hook = self.comm_hook
        return tuple(
            hook.init(jax.ShapeDtypeStruct(x.shape, x.dtype)) if isinstance(hook, StatefulHook) else ()
            for x in leaves
        )


def bucketed_all_reduce(
    tree: PyTree,
    axis: str | tuple[str, ...],
    *,
    bucket_bytes: int | Sequence[int] = DEFAULT_BUCKET_BYTES,
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES,
    comm_hook: CommHook = allreduce_hook,
    mean: bool = False,
) -> PyTree:
    """Sums a tree of arrays over mesh axes, one all-reduce per bucket; for use inside `jax.shard_map`.

    Before, on each device: `x_r`. After, on each device: `x_0 + x_1 + ...` (or their mean). The dual in the
    backward pass is the identity (each device's cotangent of the replicated result).

    Args:
        tree: pytree of arrays, per device.
        axis: mesh axis to sum over, or several.
        bucket_bytes: a bucket is closed once it holds this much; a sequence gives each bucket's size (row P4).
        first_bucket_bytes: the same for the first bucket.
        comm_hook: what goes over the wire; a stateless one.
        mean: divide by the number of devices, before summing.

    Returns:
        The same tree, replicated over `axis`.

    Raises:
        ParallelizeError: a bucket size is not positive, or the hook keeps state.

    Source: the reducer of PyTorch's DDP, rows P2, P3.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from jaxpar.ddp import bucketed_all_reduce
        >>> mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> f = jax.shard_map(lambda g: bucketed_all_reduce(g, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> jax.jit(f)({"w": jnp.arange(8.0), "b": jnp.ones(8)})
        {'b': Array([8.], dtype=float32), 'w': Array([28.], dtype=float32)}
    """
    if isinstance(comm_hook, StatefulHook):
        raise ParallelizeError(
            f"bucketed_all_reduce: {type(comm_hook).__name__} keeps state from step to step, which only jaxpar.TrainStep "
            f"stores. Use a stateless hook such as bf16_compress_hook here, or train with TrainStep."
        )
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    leaves, treedef = jax.tree.flatten(tree)
    if mean:
        leaves = [x / math.prod(jax.lax.axis_size(a) for a in axes) for x in leaves]
    limits = bucket_bytes if isinstance(bucket_bytes, int) else tuple(bucket_bytes)
    reduction = Reduction(limits, first_bucket_bytes, comm_hook)
    buckets = reduction.buckets(leaves, [axes] * len(leaves))
    reduced, _ = reduce_buckets(leaves, reduction, buckets, [()] * len(leaves))
    return jax.tree.unflatten(treedef, reduced)


# The last output of each kind of bucket: a bucket can wait only for numbers that vary over no more axes than
# its own leaves do, or its type would change. Keyed by those axes, so that it is a pytree of fixed structure.
Tokens = dict[tuple[str, ...], jax.Array]


def reduce_buckets(
    leaves: Sequence[jax.Array],
    reduction: Reduction,
    buckets: tuple[Bucket, ...],
    states: Sequence[PyTree],
    *,
    after: jax.Array | None = None,
) -> tuple[list[jax.Array], tuple[PyTree, ...]]:
    """Reduces each bucket's leaves after the one before, the first after the number `after`.

    Returns all leaves and the hook's next state for each.
    """
    # Arrays without elements are in no bucket; their sum is known, and is the same everywhere.
    out = [x if x.size else jnp.zeros(x.shape, x.dtype) for x in leaves]
    next_states = list(states)
    tokens = start_after(jnp.float32(0) if after is None else after, buckets)
    for bucket in buckets:
        mine, their_states = _members(bucket, leaves), _members(bucket, states)
        reduced, new_states, tokens = _reduce_one(mine, their_states, tokens, reduction, bucket)
        for leaf, value, state in zip(bucket.leaves, reduced, new_states, strict=True):
            out[leaf], next_states[leaf] = value, state
    return out, tuple(next_states)


def reduce_in_backward(
    leaves: Sequence[jax.Array], reduction: Reduction, buckets: tuple[Bucket, ...], states: Sequence[PyTree]
) -> tuple[list[jax.Array], Tokens]:
    """Identity on `leaves` whose backward reduces their gradients, bucket by bucket, where they are ready.

    Forward, per device: each leaf is marked as varying over its bucket's axes; no communication. Backward: the
    bucket's cotangents are summed over its axes. The cotangent of `states` is the hook's **next state**; that of
    the returned tokens is what the first bucket waits for (`start_after`).
    """
    out, tokens = list(leaves), start_after(jnp.float32(0), buckets)
    # The backward runs these in reverse: the bucket that is reduced first is applied last.
    for bucket in reversed(buckets):
        marked, tokens = _identity(reduction, bucket)(
            _members(bucket, leaves), _members(bucket, states), tokens
        )
        for leaf, value in zip(bucket.leaves, marked, strict=True):
            out[leaf] = value
    return out, tokens


def _members(bucket: Bucket, values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(values[i] for i in bucket.leaves)


def start_after(number: jax.Array, buckets: tuple[Bucket, ...]) -> Tokens:
    """Returns tokens that make the first bucket wait for `number`, which is equal on all devices."""
    return {bucket.varying: vary(number.astype(jnp.float32), bucket.varying) for bucket in buckets}


def _identity(reduction: Reduction, bucket: Bucket) -> Callable[..., Any]:
    @jax.custom_vjp
    def identity(leaves: tuple[jax.Array, ...], states: tuple[PyTree, ...], tokens: Tokens) -> Any:
        return tuple(vary(x, bucket.axes) for x in leaves), tokens

    def forward(leaves: tuple[jax.Array, ...], states: tuple[PyTree, ...], tokens: Tokens) -> Any:
        return identity(leaves, states, tokens), states

    def backward(states: tuple[PyTree, ...], cotangents: tuple[tuple[jax.Array, ...], Tokens]) -> Any:
        return _reduce_one(cotangents[0], states, cotangents[1], reduction, bucket)

    identity.defvjp(forward, backward)
    return identity


def _reduce_one(
    gradients: tuple[jax.Array, ...],
    states: tuple[PyTree, ...],
    tokens: Tokens,
    reduction: Reduction,
    bucket: Bucket,
) -> tuple[tuple[jax.Array, ...], tuple[PyTree, ...], Tokens]:
    """One bucket: the summed gradients, the hook's next states, and the tokens for the buckets after it."""
    wire = GradBucket(
        index=bucket.index,
        is_last=bucket.is_last,
        axes=bucket.axes,
        num_ranks=math.prod(jax.lax.axis_size(axis) for axis in bucket.axes),
        gradients=gradients,
        flatten_below_bytes=reduction.flatten_below_bytes,
        tokens=tuple(token for axes, token in tokens.items() if set(axes) <= set(bucket.varying)),
    )
    hook = reduction.comm_hook
    reduced, new_states = hook(wire, states) if isinstance(hook, StatefulHook) else (hook(wire), states)
    reduced = tuple(reduced)
    check_summed(hook, wire, reduced)
    # A state is per rank by type, also where a hook made it equal on all of them.
    new_states = jax.tree.map(lambda new, old: vary(new, tuple(varying_axes(old))), new_states, states)
    return reduced, new_states, tokens | {bucket.varying: number_of(reduced)}
