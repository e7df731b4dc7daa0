"""`regathering`: a call that keeps no gathered parameter for its backward pass and gathers again there.

    forward    y = fn(full, x)               kept: what the backward needs of x; the shards, which are there anyway
    backward   full = gather(shards)         again, waiting for what comes before it in the backward
               residuals made of parameters alone (casts, transposes) are made again from it

`jax.checkpoint` with a policy comes close, but it keeps what was made of a parameter (its transpose, its cast),
and XLA:CPU (jax 0.10.2) joins its second gather with the first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxpar import _compat
from jaxpar._after import number_of
from jaxpar._residuals import Static, instantiate, is_floating, split_backward

Leaves = list[jax.Array]


def regathering(
    fn: Callable[[Leaves, Leaves], Leaves],
    gather: Callable[[Leaves, Sequence[jax.Array]], Leaves],
    full: Leaves,
    shards: Leaves,
    inputs: Leaves,
    token: jax.Array | None,
) -> tuple[Leaves, jax.Array]:
    """Returns `fn(full, inputs)` and a token; the backward uses `gather(shards, after)` in place of `full`.

    Tokens carry order through the backward: the gather here waits until the backward of the call that was given
    this call's token has begun; if there is none, only for this call's own outputs. Given no token at all, it waits
    until this call's own backward can begin.

    Args:
        fn: pure, flat lists of arrays in and out.
        gather: makes `full` again from `shards`, after some numbers are known.
        full: gathered parameters; their cotangents are this call's contribution to the gradient.
        shards: what they were gathered from.
        inputs: all other arrays that `fn` reads.
        token: f32[], the token of an earlier call, or zero; None: gather nothing ahead of time.

    Returns:
        The outputs of `fn`, and this call's token.
    """

    @jax.custom_vjp
    def call(
        full: Leaves, shards: Leaves, inputs: Leaves, token: jax.Array | None
    ) -> tuple[Leaves, jax.Array]:
        return fn(full, inputs), jnp.float32(0)

    def forward(full: Any, shards: Any, inputs: Any, token: Any) -> Any:
        is_wanted = [x.perturbed and is_floating(x.value) for x in (*full, *inputs)]
        full, inputs = [x.value for x in full], [x.value for x in inputs]
        split = split_backward(fn, full, inputs, is_wanted)
        outputs, kept = split.forward(full, inputs)
        done = number_of([x for x in outputs if is_floating(x)][:1])
        return (outputs, jnp.float32(0)), (kept, [x.value for x in shards], done, Static(split))

    def backward(saved: Any, cotangents: Any) -> Any:
        kept, shards, done, split = saved
        outputs = [instantiate(ct) for ct in cotangents[0]]
        begun = number_of([ct for ct in outputs if ct.dtype != jax.dtypes.float0])
        begun = _compat.forget_axes(begun, tuple(_compat.varying_axes(jax.typeof(begun))))
        if token is None:
            after = [begun]
        else:
            after = [done] if isinstance(cotangents[1], SymbolicZero) else [done, cotangents[1]]
        full_cotangents, input_cotangents = split.value.backward(gather(shards, after), kept, outputs)
        return full_cotangents, None, input_cotangents, None if token is None else begun

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(full, [jax.lax.stop_gradient(x) for x in shards], inputs, token)
