"""Count the programs that JAX compiles, to assert that a step compiles once per batch shape.

first call    trace -> lower -> compile     counted
second call   cached                        not counted
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass
class CompilationCount:
    """Compilations seen so far, each by the name of the compiled function."""

    names: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of compilations, of any function."""
        return len(self.names)

    def count_of(self, name: str) -> int:
        """Number of compilations of the function that JAX calls `name`, e.g. `jit(step)`."""
        return self.names.count(name)


@contextlib.contextmanager
def count_compilations() -> Iterator[CompilationCount]:
    """Count compilations inside a `with` block, in the whole process.

    Operations outside `jit` (`jnp.ones`) compile programs of their own: make arrays before the block, or count by
    name.

    Yields:
        A counter that grows while the block runs and keeps its value after it.

    Example:
        >>> import jax, numpy as np
        >>> double = jax.jit(lambda x: 2 * x)
        >>> with count_compilations() as compiled:
        ...     for size in (3, 3, 4):
        ...         _ = double(np.ones(size))
        >>> compiled.count
        2
    """
    counter = CompilationCount()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            counter.names.append(str(kwargs.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counter
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
