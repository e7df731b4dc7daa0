"""Eight CPU devices for every test and doctest, set once before any backend starts; and programs compiled quickly."""

from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True, scope="module")
def compile_quickly() -> Iterator[None]:
    """LLVM's effort takes half of a step's compilation; HLO and memory plans are the same, values too but for rounding.

    A module whose programs are for another compiler defines a fixture of this name that does nothing.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
