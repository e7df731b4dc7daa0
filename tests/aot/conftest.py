"""Programs for accelerators share their kernels: what takes half of the time of a compilation is done once."""

from collections.abc import Callable

import jax
import pytest

Compile = Callable[[jax.stages.Lowered], jax.stages.Compiled]


@pytest.fixture(scope="session")
def compile_for_gpu(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """`compile_for_gpu(lowered)`: XLA keeps kernels by their content, so the program is that of any other compilation."""
    kernels = tmp_path_factory.mktemp("kernels") / "cache"
    return lambda lowered: lowered.compile({"xla_gpu_kernel_cache_file": str(kernels)})


@pytest.fixture(autouse=True, scope="module")
def compile_quickly() -> None:
    """Accelerators' programs are compiled with all optimizations: what overlaps with what is their result."""
