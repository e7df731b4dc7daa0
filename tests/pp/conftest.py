"""What tests of pipelines that compare values share: float64, in which 1e-12 tells a wrong term from rounding."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def float64() -> Iterator[None]:
    """Everything in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def float64_values_only(float64: None) -> Iterator[None]:
    """The same, compiled without most optimizations: for tests that look at values, and not at programs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
