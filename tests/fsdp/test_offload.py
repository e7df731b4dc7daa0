"""Parameters and optimizer state in host memory between steps (row F7): the same numbers, to the last bit."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.ddp import DistributedDataParallel
from jaxpar.fsdp import CPUOffloadPolicy, fully_shard, offload_optimizer_state, shard_optimizer_state
from jaxpar.fsdp._offload import check_host_memory, on_device, to_host
from jaxpar.mesh import DeviceMesh, init_device_mesh

HOST = "pinned_host"


@pytest.fixture(scope="module")
def mesh() -> DeviceMesh:
    return init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])


def make_model() -> nnx.Module:
    """The bias of 3 is replicated."""
    return nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(8, 3, rngs=nnx.Rngs(1)))


def kinds(module: nnx.Pytree, kind: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(nnx.state(module, kind))}


def sharded(mesh: DeviceMesh, *, is_offloaded: bool) -> tuple[Any, nnx.Optimizer]:
    """Parameters on the host; the state is there because the optimizer is built from them."""
    policy = CPUOffloadPolicy() if is_offloaded else None
    model = fully_shard(make_model(), mesh, units=("layers.0", "layers.2"), offload_policy=policy)
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def sliced(mesh: DeviceMesh, *, is_offloaded: bool) -> tuple[Any, nnx.Optimizer]:
    """State on the host, 1/n on each device's; parameters on the device."""
    model = DistributedDataParallel(make_model(), mesh)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    if is_offloaded:
        offload_optimizer_state(optimizer, mesh)
    return model, shard_optimizer_state(optimizer, mesh)


@pytest.mark.parametrize(("build", "parameters"), [(sharded, HOST), (sliced, "device")])
def test_offloading_changes_where_things_lie_between_steps_and_no_number(
    build: Any, parameters: str, mesh: DeviceMesh
) -> None:
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    results = []
    for is_offloaded in (False, True):
        model, optimizer = build(mesh, is_offloaded=is_offloaded)
        step = jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh, clip_norm=0.5)
        losses = []
        for _ in range(3):
            if is_offloaded:
                assert kinds(model, nnx.Param) == {parameters}
                assert kinds(optimizer, nnx.OptVariable) == {HOST}
            losses.append(float(step(x)["loss"]))
        state = (nnx.state(model, nnx.Param), nnx.state(optimizer, nnx.OptVariable))
        results.append((losses, [np.asarray(x) for x in jax.tree.leaves(state)]))
    assert results[0][0] == results[1][0]
    for without, offloaded in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_array_equal(offloaded, without)


def test_state_not_yet_on_a_mesh_and_abstract_state_are_taken(mesh: DeviceMesh) -> None:
    model = nnx.eval_shape(make_model)
    optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param), model)
    assert offload_optimizer_state(optimizer, mesh) is optimizer
    assert kinds(optimizer, nnx.OptVariable) == {HOST}
    shard_optimizer_state(optimizer, mesh)
    assert kinds(optimizer, nnx.OptVariable) == {HOST}
    step = jaxpar.TrainStep(lambda m, x: m(x).mean(), model, optimizer, mesh=mesh)
    rows = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    shardings = jax.tree.leaves(step.lower(rows).compile().output_shardings)
    assert sum(sharding.memory_kind == HOST for sharding in shardings) == 8  # mu and nu of four parameters


def test_arrays_go_to_the_host_and_back_eagerly_and_traced(mesh: DeviceMesh) -> None:
    sharding = NamedSharding(mesh.jax_mesh, PartitionSpec("dp"))
    x = jax.device_put(jnp.arange(8.0), sharding)
    host = to_host(x)
    assert host.sharding.memory_kind == HOST and host.sharding.spec == sharding.spec
    assert on_device(x) is x
    assert on_device(host).sharding == sharding
    np.testing.assert_array_equal(jax.jit(lambda x: on_device(x) + 1)(host), np.arange(1.0, 9.0))


def test_an_optimizer_without_state_and_memory_that_is_not_pinned_are_refused(mesh: DeviceMesh) -> None:
    model = nnx.eval_shape(make_model)
    optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, optax.sgd(1e-2), wrt=nnx.Param), model)
    with pytest.raises(ParallelizeError, match=re.escape("keeps no array per parameter")):
        offload_optimizer_state(optimizer, mesh)
    with pytest.raises(ParallelizeError, match=re.escape("CPUOffloadPolicy(pin_memory=False)")):
        CPUOffloadPolicy(pin_memory=False)


def test_a_backend_without_pinned_host_memory_is_named_with_what_it_has() -> None:
    with pytest.raises(
        ParallelizeError, match=re.escape("the backend 'toy' does not have: its devices have ['device']")
    ):
        check_host_memory("toy", ["device"])


def test_an_offloaded_model_can_be_called_outside_a_step(mesh: DeviceMesh) -> None:
    model, _ = sharded(mesh, is_offloaded=True)
    x = jnp.ones((2, 4))
    np.testing.assert_allclose(model(x), make_model()(x), rtol=1e-6)
    assert kinds(model, nnx.Param) == {HOST}
