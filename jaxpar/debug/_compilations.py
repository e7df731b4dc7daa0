"""Count the programs that JAX compiles, to assert that a step compiles once per batch shape.

first call    trace -> lower -> compile     counted
second call   cached                        not counted
restart       trace -> lower -> load        not counted, but named in `loaded`, if JAX's persistent cache keeps programs
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax.monitoring

_COMPILED = "/jax/core/compile/backend_compile_duration"  # told at the end, of loaded programs too
_LOADED = "/jax/compilation_cache/cache_hits"  # told before, on the same thread


@dataclass
class CompilationCount:
    """Compilations seen so far, each by the name of the compiled function; and programs that were loaded instead."""

    names: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

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
    hits: set[int] = set()  # threads that have loaded a program and not yet told its name

    def listen_for_hits(event: str, **_: str | int) -> None:
        if event == _LOADED:
            hits.add(threading.get_ident())

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED:
            names = counter.loaded if threading.get_ident() in hits else counter.names
            hits.discard(threading.get_ident())
            names.append(str(kwargs.get("fun_name", "")))

    jax.monitoring.register_event_listener(listen_for_hits)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counter
    finally:
        jax.monitoring.unregister_event_listener(listen_for_hits)
        jax.monitoring.unregister_event_duration_listener(listen)
