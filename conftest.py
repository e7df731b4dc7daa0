"""Eight CPU devices for every test and doctest, set once before any backend starts; and programs compiled quickly."""

import os
from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# Read once, when a backend starts; launched workers, notebooks and examples inherit them. Tests share the cores already.
# Up to jax 0.11 XLA:CPU has two emitters of fused loops, of which the default's MLIR takes half of a compilation; the
# names of flags that XLA does not know end the process.
QUICK = ["--xla_cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*QUICK, os.environ.get("XLA_FLAGS", "")]).strip()


@pytest.fixture(autouse=True, scope="module")
def compile_quickly() -> Iterator[None]:
    """LLVM's effort takes half of a step's compilation; HLO and memory plans are the same, values too but for rounding.

    A module whose programs are for another compiler defines a fixture of this name that does nothing.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
