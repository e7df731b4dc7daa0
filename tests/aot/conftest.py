"""Programs for accelerators share their kernels: what takes half of the time of a compilation is done once."""

from collections.abc import Callable

import jax
import pytest

from jaxpar._compat import compiler_options

Compile = Callable[[jax.stages.Lowered], jax.stages.Compiled]


@pytest.fixture(scope="session")
def compile_for_gpu(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """`compile_for_gpu(lowered)`: XLA keeps kernels by their content, so the program is that of any other compilation.

    With the options of `TrainStep`, which what was lowered without one does not have.
    """
    kernels = tmp_path_factory.mktemp("kernels") / "cache"
    options = compiler_options("gpu") | {"xla_gpu_kernel_cache_file": str(kernels)}
    return lambda lowered: lowered.compile(options)


@pytest.fixture(autouse=True, scope="module")
def compile_quickly() -> None:
    """Accelerators' programs are compiled with all optimizations: what overlaps with what is their result."""
