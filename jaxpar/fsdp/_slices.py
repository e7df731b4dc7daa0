"""Replicated parameters of which each device updates one slice: what ZeRO-1 does to gradients.

    forward    every device: the whole parameter, which it has            nothing moves
    backward   device r: a gradient of the whole  --reduce-scatter-->  device r: slice r of the sum
    update     device r: slice r, updated         --all-gather------>  every device: the whole

Everything here runs inside `jax.shard_map`, on flat lists of leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar._after import number_of
from jaxpar._compat import forget_axes
from jaxpar._module import varying_axes
from jaxpar.fsdp._unshard import Gather

Leaves = list[jax.Array]


@dataclass(frozen=True)
class Slices:
    """How leaves are sliced.

    Args:
        dims: of each leaf the dim that is cut; None: it is not.
        axes: of each leaf the mesh axes of size above 1 that cut it, the first varying slowest.
        flatten_below_bytes: gradients of a group that are smaller than this share one flat buffer.
    """

    dims: tuple[int | None, ...]
    axes: tuple[tuple[str, ...], ...]
    flatten_below_bytes: int

    def take(self, leaves: Sequence[jax.Array]) -> Leaves:
        """This device's slices; leaves that are not cut as they are."""
        return [
            x if dim is None else _slice(x, dim, axes)
            for x, dim, axes in zip(leaves, self.dims, self.axes, strict=True)
        ]

    def whole(
        self, slices: Sequence[jax.Array], leaves: Sequence[jax.Array], groups: Sequence[Sequence[int]]
    ) -> tuple[Leaves, jax.Array]:
        """The leaves, in a way that the gradient of `slices` is this device's slice of their summed gradient.

        Args:
            slices: this device's slices.
            leaves: the whole leaves, marked as varying over the axes that cut them.
            groups: leaves whose gradients travel together, in the order in which they become ready.

        Returns:
            The leaves, and a token whose cotangent is what the first group waits for.
        """
        out, token = list(slices), jnp.float32(0)
        for group in reversed(groups):  # the backward runs these in reverse
            full = [leaves[i] for i in group]
            full, token = _scatter_in_backward(self._gather(group), [slices[i] for i in group], full, token)
            for leaf, value in zip(group, full, strict=True):
                out[leaf] = value
        return out, token

    def scatter(
        self, grads: Sequence[jax.Array], groups: Sequence[Sequence[int]], after: jax.Array
    ) -> Leaves:
        """This device's slices of the sums of gradients, one group after the other, the first after a number."""
        out = list(grads)
        for group in groups:
            parts = _scatter(self._gather(group), [grads[i] for i in group], after)
            for leaf, part in zip(group, parts, strict=True):
                out[leaf] = part
            after = number_of(parts)
        return out

    def gather(self, slices: Sequence[jax.Array], groups: Sequence[Sequence[int]]) -> Leaves:
        """The whole leaves, equal on all devices, one group after the other."""
        out, before = list(slices), []
        for group in groups:
            gather = self._gather(group)
            whole = gather.again([slices[i] for i in group], before)
            before = [number_of(whole)]
            for leaf, value in zip(group, whole, strict=True):
                out[leaf] = forget_axes(value, gather.axes)  # what was gathered is the same everywhere
        return out

    def _gather(self, group: Sequence[int]) -> Gather:
        return Gather(
            dims=tuple(self.dims[i] for i in group),
            axes=self.axes[group[0]],
            flatten_below_bytes=self.flatten_below_bytes,
        )


def _slice(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    size = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, dim)


def _scatter(gather: Gather, grads: Leaves, after: jax.Array) -> Leaves:
    like = [x if d is None else _slice(x, d, gather.axes) for x, d in zip(grads, gather.dims, strict=True)]
    wires = gather.wires(like, [True] * len(like))
    return gather.scatter(grads, wires, like, [after])


def _scatter_in_backward(
    gather: Gather, slices: Leaves, full: Leaves, token: jax.Array
) -> tuple[Leaves, jax.Array]:
    @jax.custom_vjp
    def identity(slices: Leaves, full: Leaves, token: jax.Array) -> tuple[Leaves, jax.Array]:
        return full, token

    def backward(_: None, cotangents: tuple[Leaves, jax.Array]) -> Any:
        parts = _scatter(gather, *cotangents)
        done = number_of(parts)
        return parts, None, forget_axes(done, tuple(varying_axes(done)))

    identity.defvjp(lambda *values: (identity(*values), None), backward)
    return identity(slices, [jax.lax.stop_gradient(x) for x in full], token)
