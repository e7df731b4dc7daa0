"""One bucket of gradients on its way over the wire.

    gradients   [bias 1 KiB] [weight 4 MiB] [scale 1 KiB]          this rank's contributions
    buffers     [bias+scale, one flat buffer] [weight as it is]    small ones share a buffer, large ones are not copied
    one all-reduce of all buffers, then the same split back

A chain of tokens keeps XLA from joining the all-reduces of different buckets into one at the end: the input
of each depends on the output of the one before.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpar._after import wait_for
from jaxpar._module import vary


@dataclass(frozen=True)
class GradBucket:
    """What a communication hook is given; PyTorch's `GradBucket`.

    The gradients are contributions: they are scaled already so that their **sum** over `axes` is the gradient.
    A hook must return that sum (exact or compressed) and must not divide again.

    Args:
        index: place among the buckets, in the order in which they are reduced.
        is_last: no bucket follows.
        axes: mesh axes to reduce over.
        num_ranks: product of their sizes.
        gradients: this rank's contributions, per device, in the order in which they became ready.
        flatten_below_bytes: arrays smaller than this share one flat buffer.
        tokens: f32[] each, outputs of the buckets before.
    """

    index: int
    is_last: bool
    axes: tuple[str, ...]
    num_ranks: int
    gradients: tuple[jax.Array, ...]
    flatten_below_bytes: int
    tokens: tuple[jax.Array, ...]

    def all_reduce(self, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Sums arrays over the bucket's axes in one all-reduce.

        Before, on each device: `x_r`. After, on each device: `x_0 + x_1 + ...`.

        Args:
            arrays: any arrays of one dtype, per device; the gradients, or a compressed form of them.

        Returns:
            Their sums, same shapes and dtypes.
        """
        buffers = tuple(wait_for(vary(buffer, self.axes), self.tokens) for buffer in self._pack(arrays))
        return self._unpack(jax.lax.psum(buffers, self.axes), arrays)

    def _small(self, arrays: tuple[jax.Array, ...]) -> list[int]:
        small = [i for i, x in enumerate(arrays) if x.size * x.dtype.itemsize < self.flatten_below_bytes]
        return small if len(small) > 1 else []

    def _pack(self, arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
        small = self._small(arrays)
        flat = [jnp.concatenate([vary(arrays[i], self.axes).ravel() for i in small])] if small else []
        return flat + [x for i, x in enumerate(arrays) if i not in small]

    def _unpack(self, buffers: tuple[jax.Array, ...], like: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        small = self._small(like)
        out = dict(zip((i for i in range(len(like)) if i not in small), buffers[bool(small) :], strict=True))
        offset = 0
        for i in small:
            out[i] = buffers[0][offset : offset + like[i].size].reshape(like[i].shape)
            offset += like[i].size
        return tuple(out[i] for i in range(len(like)))
