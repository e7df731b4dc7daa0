"""One conversion for all layers that read the same array.

    x --all-gather--+--> gate          not   x --all-gather--> gate
                    +--> up                  x --all-gather--> up

The backward then sums the layers' contributions first and has one collective for them too. PyTorch reaches it with a
`PrepareModuleInput` on the module around; here it holds for any layers, wherever they lie.
"""

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from jaxpar import _compat

Results = dict[Any, list[tuple[Any, jax.Array, jax.Array]]]
_RESULTS: contextvars.ContextVar[Results | None] = contextvars.ContextVar("jaxpar_tp_shared", default=None)


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Within the block conversions are shared; they are forgotten at its end."""
    if _RESULTS.get() is not None:
        yield
        return
    reset = _RESULTS.set({})
    try:
        yield
    finally:
        _RESULTS.reset(reset)


def shared(x: jax.Array, what: Hashable, convert: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns `convert(x)`: of the same array, in the same trace, for the same `what`, always the same one."""
    results = _RESULTS.get()
    if results is None:
        return convert(x)
    # What a trace inside (jax.checkpoint, jax.lax.scan) made of x must not leave it. x is kept too: while it lives, its id
    # is not given to another array.
    trace, known = _compat.trace_state(), results.setdefault((id(x), what), [])
    for its_trace, _, result in known:
        if its_trace == trace:
            return result
    result = convert(x)
    known.append((trace, x, result))
    return result
