"""The order of a step's collectives: which unit's gather may start when.

    forward    unit i starts  ->  the gather of unit i + prefetch may start
    backward   unit i starts  ->  the gather of unit i - prefetch may start

An `Order` lives while one forward is traced. The numbers and tokens in it belong to that trace; a unit that is
called inside another one (`jax.checkpoint`, `jax.lax.scan`, a unit that gathers again) begins an order of its own.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar import _compat


@dataclasses.dataclass
class Order:
    """What the units of one trace have said so far.

    Args:
        trace: of which trace.
        root: the module that the loss function is given, if known.
        is_cut: the trace will be cut into stages: the root's gather waits for nothing, so that each stage that uses the root's
            parameters makes it for itself.
        modules: units in progress, outermost first: their parameters are gathered.
        started: f32[] for each unit, in the order of calls: known once the unit has started.
        tokens: of the calls that gather again, for the order of their backward.
        scatter_token: of the last gather, for the order of the reduce-scatters.
        gathered: for units of several modules, their gathered parameters, by variable.
    """

    trace: Any
    root: Any = None
    is_cut: bool = False
    modules: tuple[Any, ...] = ()
    started: list[jax.Array] = dataclasses.field(default_factory=list)
    tokens: list[jax.Array] = dataclasses.field(default_factory=list)
    scatter_token: jax.Array = dataclasses.field(default_factory=lambda: jnp.float32(0))
    gathered: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def inside(self, module: Any) -> Iterator[None]:
        """While the unit's own code runs."""
        before, self.modules = self.modules, (*self.modules, module)
        try:
            yield
        finally:
            self.modules = before

    def restart(self) -> None:
        """At the entry of a stage: nothing here waits for what an earlier stage did."""
        self.started.clear()
        self.tokens.clear()
        self.gathered.clear()
        self.scatter_token = jnp.float32(0)

    def is_running(self, module: Any) -> bool:
        """Whether the unit is in progress (one of its methods calls another)."""
        return any(module is running for running in self.modules)


_CURRENT: contextvars.ContextVar[Order | None] = contextvars.ContextVar("jaxpar_fsdp_order", default=None)


@contextlib.contextmanager
def new_order(root: Any = None, modules: tuple[Any, ...] = (), *, is_cut: bool = False) -> Iterator[Order]:
    """Begins an order; it ends with the block."""
    order = Order(_compat.trace_state(), root, is_cut, modules)
    reset = _CURRENT.set(order)
    try:
        yield order
    finally:
        _CURRENT.reset(reset)


def restart_order() -> None:
    """Restarts the order of this trace, if there is one."""
    order = _CURRENT.get()
    if order is not None and order.trace == _compat.trace_state():
        order.restart()


def modules_at_hand() -> tuple[Any, ...]:
    """Where to look for a variable of this trace: the model, and the units in progress, outermost first."""
    order = _CURRENT.get()
    return () if order is None else (*([] if order.root is None else [order.root]), *order.modules)


@contextlib.contextmanager
def current_order() -> Iterator[Order]:
    """The order of this trace, or a new one."""
    order = _CURRENT.get()
    if order is not None and order.trace == _compat.trace_state():
        yield order
    else:
        with new_order(root=None if order is None else order.root) as order:
            yield order
