"""Communication hooks: what a bucket of gradients looks like on the wire.

    hook                 wire                                   bytes, of fp32
    allreduce_hook       the gradients as they are              1
    bf16_compress_hook   cast to bfloat16, summed, cast back    1/2
    fp16_compress_hook   cast to float16, summed, cast back     1/2
    PowerSGD(rank)       two thin factors, error fed back       (rows + cols) * rank / (rows * cols)

PyTorch's `noop_hook` (row P36) has no counterpart: gradients that differ between ranks would make a replicated
parameter differ, which JAX's types do not allow. A mesh axis left out of `batch_axes` does what it is used for.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxpar._errors import ParallelizeError
from jaxpar._module import varying_axes
from jaxpar._pytree import PyTree
from jaxpar.ddp._grad_bucket import GradBucket


@runtime_checkable
class StatefulHook(Protocol):
    """A hook that remembers something from step to step, per rank and parameter (such as an error to feed back).

    `TrainStep` keeps the states. They leave the backward pass as cotangents, so they hold **floating** arrays only.
    """

    def init(self, gradient: jax.ShapeDtypeStruct) -> PyTree:
        """Returns the state for one parameter's gradient, before the first step."""
        ...

    def __call__(
        self, bucket: GradBucket, states: tuple[PyTree, ...]
    ) -> tuple[tuple[jax.Array, ...], tuple[PyTree, ...]]:
        """Returns the bucket's summed gradients and their next states, both in the bucket's order."""
        ...


class CommHook(Protocol):
    """A stateless hook: a function of the bucket that returns its summed gradients."""

    def __call__(self, bucket: GradBucket, /) -> tuple[jax.Array, ...]:
        """Returns the summed gradients, in the bucket's order, shapes and dtypes."""
        ...


def allreduce_hook(bucket: GradBucket) -> tuple[jax.Array, ...]:
    """Sums the gradients as they are: one all-reduce over the bucket's axes. The default (row P30)."""
    return bucket.all_reduce(bucket.gradients)


def bf16_compress_hook(bucket: GradBucket) -> tuple[jax.Array, ...]:
    """Sums the gradients in bfloat16, half of fp32's bytes (row P31).

    Each rounding is at most 2^-8 relative: of every contribution, and of every partial sum.
    """
    return _cast_and_sum(bucket, jnp.bfloat16)


def fp16_compress_hook(bucket: GradBucket) -> tuple[jax.Array, ...]:
    """Sums the gradients in float16, half of fp32's bytes (row P31).

    Each rounding is at most 2^-11 relative: of every contribution, and of every partial sum. Contributions are divided by the number of ranks before they are summed, so the sum overflows only where the
    gradient itself does.
    """
    return _cast_and_sum(bucket, jnp.float16)


def _cast_and_sum(bucket: GradBucket, dtype: Any) -> tuple[jax.Array, ...]:
    summed = bucket.all_reduce(tuple(g.astype(dtype) for g in bucket.gradients))
    return tuple(s.astype(g.dtype) for s, g in zip(summed, bucket.gradients, strict=True))


def check_hook(hook: Any) -> None:
    """Raises ParallelizeError if `hook` cannot be called with a bucket."""
    if isinstance(hook, type) or not callable(hook):
        raise ParallelizeError(
            f"comm_hook={hook!r}: a communication hook is called with a bucket and returns its summed gradients. Pass a "
            f"function, such as comm_hook=bf16_compress_hook, or an object, such as comm_hook=PowerSGD()."
        )


def check_summed(hook: Any, bucket: GradBucket, summed: tuple[jax.Array, ...]) -> None:
    """Raises ParallelizeError if a hook's result is not the sum of the bucket's gradients, by type."""
    wanted = [(x.shape, x.dtype) for x in bucket.gradients]
    got = [(x.shape, x.dtype) for x in summed]
    local = sorted(set().union(*(varying_axes(x) for x in summed)) & set(bucket.axes))
    if got != wanted or local:
        name = getattr(hook, "__name__", type(hook).__name__)
        raise ParallelizeError(
            f"comm_hook {name} returned "
            + (f"gradients that differ from rank to rank of {local}" if local else f"{_types(got)}")
            + f" for a bucket of {_types(wanted)}. It must return one sum over {bucket.axes} per gradient, with the "
            f"gradient's shape and dtype: return bucket.all_reduce(bucket.gradients), or a compressed form cast back."
        )


def _types(types: list[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in types) or "nothing"
