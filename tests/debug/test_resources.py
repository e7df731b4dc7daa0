"""Memory plans, compilation counts, and clusters that are not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar._errors import MeshError
from jaxpar.debug import count_compilations, memory, topology
from jaxpar.debug._topology import has_gpu_compiler
from jaxpar.mesh import init_device_mesh

MESH = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh


def test_memory_is_per_device_and_sees_donation() -> None:
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(MESH, P("dp", "tp")))
    kept, donated = memory(jax.jit(lambda x: x + 1), x), memory(jax.jit(lambda x: x + 1, donate_argnums=0), x)
    block = 8 * 64 * 4 // 8
    assert (kept.argument_bytes, kept.output_bytes, kept.alias_bytes) == (block, block, 0)
    assert (donated.argument_bytes, donated.output_bytes, donated.alias_bytes) == (block, block, block)
    assert kept.total_bytes - donated.total_bytes == block
    assert "arguments 256 B + outputs 256 B - alias 256 B" in str(donated)


def test_memory_of_text_is_refused() -> None:
    with pytest.raises(TypeError, match="HLO text does not hold XLA's memory plan"):
        memory("HloModule m")


def test_compilations_are_counted_once_per_shape_and_by_name() -> None:
    def step(x: jax.Array) -> jax.Array:
        return x * 2

    jitted = jax.jit(step)
    batches = [np.ones(3), np.ones(3), np.ones(4)]
    with count_compilations() as compiled:
        for batch in batches:
            jitted(batch)
    assert (compiled.count, compiled.count_of("jit(step)")) == (2, 2)
    with count_compilations() as again:
        jitted(batches[0])
    assert again.count == 0
    jitted(np.ones(5))
    assert compiled.count == 2  # the listener is gone after the block


@pytest.mark.parametrize(
    ("kind", "num_devices", "message"),
    [
        ("h200x", 8, "device kind unknown. Known kinds: h100"),
        ("h100", 12, "12 devices do not fill hosts of 8"),
        ("h100", 0, "0 devices do not fill hosts of 8"),
    ],
)
def test_impossible_topologies_are_named(kind: str, num_devices: int, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        topology(kind, num_devices=num_devices)


@pytest.mark.parametrize("finder", ["nothing installed", "plugin without JAX's own package"])
def test_without_the_compiler_the_extra_is_named(finder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> object | None:
        return object() if name == "jax_plugins" and finder != "nothing installed" else None

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    assert not has_gpu_compiler()
    with pytest.raises(MeshError, match=r"pip install 'jaxpar\[aot\]'"):
        topology("h100", num_devices=8)


def test_a_plugin_that_jax_did_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refuse)
    with pytest.raises(MeshError, match=r"jax.config.update\('jax_platforms', 'cpu'\)"):
        topology("h100", num_devices=8)
