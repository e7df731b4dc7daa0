"""`unshard`: whole parameters from the parts of all devices; its dual sums gradients into parts.

forward    device r: part r      --all-gather-->       device r: the whole       (1 per wire)
backward   device r: part r of the sum over devices   <--reduce-scatter--   device r: a gradient of the whole
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxpar._after import copy_after, number_of, wait_for
from jaxpar._compat import forget_axes
from jaxpar._module import vary, varying_axes
from jaxpar._residuals import Static, instantiate, is_floating
from jaxpar.fsdp._policy import MixedPrecisionPolicy
from jaxpar.fsdp._wires import Wire, assign_wires, pack_full, pack_shards, unpack_full, unpack_shards

Leaves = list[jax.Array]
DEFAULT_FLATTEN_BELOW_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Gather:
    """How the leaves of a unit are gathered and their gradients scattered, inside `jax.shard_map`.

    Args:
        dims: dim along which each leaf is sharded; None: replicated.
        axes: mesh axes of size above 1 over which they are sharded, the first varying slowest.
        policy: dtypes.
        flatten_below_bytes: whole leaves smaller than this share a flat buffer.
        send_as_integers: send 16-bit floats as integers: XLA:CPU would widen them to 32 bits.
    """

    dims: tuple[int | None, ...]
    axes: tuple[str, ...]
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    flatten_below_bytes: int = DEFAULT_FLATTEN_BELOW_BYTES
    send_as_integers: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of parts."""
        return math.prod(jax.lax.axis_size(axis) for axis in self.axes)

    def __call__(
        self, shards: Sequence[jax.Array], token: jax.Array, after: Sequence[jax.Array] = ()
    ) -> tuple[Leaves, jax.Array]:
        """The whole leaves, in the dtype that computes, and a token.

        Backward: the parts of the summed gradients, of those leaves only that are differentiated.

        Args:
            shards: this device's parts.
            token: f32[], the token of the call before, or zero. Tokens carry order through the backward: the
                reduce-scatters here wait for those of the call that was given this call's token.
            after: numbers, f32[], before which no all-gather starts.
        """
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shards]

        @jax.custom_vjp
        def unshard(shards: Leaves, token: jax.Array, after: Leaves) -> tuple[Leaves, jax.Array]:
            return self.again(shards, after), token

        def forward(shards: Any, token: Any, after: Any) -> Any:
            values = [x.value for x in shards]
            wanted = tuple(x.perturbed and is_floating(x.value) for x in shards)
            wires = self.wires(self.cast(values), wanted)
            whole = self.again(values, [number.value for number in after])
            return (whole, token.value), Static((wanted, wires))

        def backward(plan: Static, cotangents: tuple[list[Any], Any]) -> Any:
            wanted, wires = plan.value
            grads = [
                instantiate(ct) if want else None for ct, want in zip(cotangents[0], wanted, strict=True)
            ]
            behind = [] if isinstance(cotangents[1], SymbolicZero) else [cotangents[1]]
            parts = self.scatter(grads, wires, like, behind)
            done = number_of([parts[i] for wire in wires for i in wire.leaves])
            return parts, forget_axes(done, tuple(varying_axes(done))), None

        unshard.defvjp(forward, backward, symbolic_zeros=True)
        return unshard(list(shards), token, [jax.lax.stop_gradient(number) for number in after])

    def again(self, shards: Sequence[jax.Array], after: Sequence[jax.Array]) -> Leaves:
        """The whole leaves once more, in a backward pass; not differentiable."""
        cast = self.cast(shards)
        out = list(cast)
        for wire in self.wires(cast, [True] * len(cast)):
            mine, dims = [cast[i] for i in wire.leaves], self._dims_of(wire)
            if wire.is_flat:
                parts = self._all_gather(wait_for(pack_shards(mine), after), dim=0, tiled=False)
                whole = unpack_full(parts, mine, dims)
            else:
                whole = [self._all_gather(copy_after(mine[0], after), dim=dims[0], tiled=True)]
            for leaf, value in zip(wire.leaves, whole, strict=True):
                out[leaf] = value
        return out

    def cast(self, shards: Sequence[jax.Array]) -> Leaves:
        """The shards in the dtype that travels."""
        dtype = self.policy.param_dtype
        return [x.astype(dtype) if dtype and jnp.issubdtype(x.dtype, jnp.floating) else x for x in shards]

    def wires(self, cast: Leaves, chosen: Sequence[bool]) -> tuple[Wire, ...]:
        """The collectives of the chosen leaves: all forward, those that have a gradient backward."""
        if not self.axes:
            return ()
        dims = [dim if choose else None for dim, choose in zip(self.dims, chosen, strict=True)]
        return assign_wires(
            cast, dims, num_ranks=self.num_ranks, flatten_below_bytes=self.flatten_below_bytes
        )

    def scatter(
        self, grads: list[Any], wires: tuple[Wire, ...], like: Sequence[Any], after: Sequence[jax.Array]
    ) -> list[Any]:
        """This device's parts of the summed gradients, in the stored dtypes; None where no gradient is."""
        out, reduce_dtype = list(grads), self.policy.reduce_dtype
        for wire in wires:
            whole = [grads[i].astype(reduce_dtype or grads[i].dtype) for i in wire.leaves]
            dims = self._dims_of(wire)
            if wire.is_flat:
                buffer = self._reduce_scatter(pack_full(whole, dims, self.num_ranks), after, dim=0)
                parts = unpack_shards(buffer, [like[i].shape for i in wire.leaves])
            else:
                parts = [self._reduce_scatter(whole[0], after, dim=dims[0])]
            for leaf, value in zip(wire.leaves, parts, strict=True):
                out[leaf] = value
        return [None if g is None else g.astype(x.dtype) for g, x in zip(out, like, strict=True)]

    def _dims_of(self, wire: Wire) -> list[int]:
        return [dim for i in wire.leaves if (dim := self.dims[i]) is not None]

    def _all_gather(self, x: jax.Array, *, dim: int, tiled: bool) -> jax.Array:
        x, dtype = vary(x, self.axes), x.dtype
        is_disguised = self.send_as_integers and dtype.itemsize == 2
        sent = jax.lax.bitcast_convert_type(x, jnp.uint16) if is_disguised else x
        whole = jax.lax.all_gather(sent, self.axes, axis=dim, tiled=tiled)
        return jax.lax.bitcast_convert_type(whole, dtype) if is_disguised else whole

    def _reduce_scatter(self, x: jax.Array, after: Sequence[jax.Array], *, dim: int) -> jax.Array:
        return jax.lax.psum_scatter(wait_for(x, after), self.axes, scatter_dimension=dim, tiled=True)
