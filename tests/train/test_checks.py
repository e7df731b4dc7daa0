"""A sharded model that a step would train wrongly is refused when the step is built."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.fsdp import fully_shard
from jaxpar.mesh import DeviceMesh, init_device_mesh


@pytest.fixture(scope="module")
def mesh() -> DeviceMesh:
    return init_device_mesh((2, 4), ("dp", "shard"))


def make_model() -> Any:
    """Abstract: shapes and shardings are all that is checked."""
    return nnx.eval_shape(
        lambda: nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 3, rngs=nnx.Rngs(1)))
    )


def struct(shape: tuple[int, ...], mesh: DeviceMesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh.jax_mesh, spec))


def make_step(model: Any, mesh: DeviceMesh, batch_axes: Any) -> jaxpar.TrainStep:
    optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param), model)
    return jaxpar.TrainStep(lambda m, x: m(x).mean(), model, optimizer, mesh=mesh, batch_axes=batch_axes)


def test_a_unit_over_an_axis_that_does_not_split_the_batch_is_refused(mesh: DeviceMesh) -> None:
    model = make_model()
    fully_shard(model.layers[1], mesh["shard"])
    with pytest.raises(ParallelizeError, match=re.escape("TrainStep: layers.1 (FSDPLinear)")) as caught:
        make_step(model, mesh, "dp")
    assert "batch_axes=('dp',) does not split the batch over 'shard'" in str(caught.value)
    assert "Write TrainStep(..., batch_axes=('dp', 'shard'))" in str(caught.value)
    make_step(model, mesh, ("dp", "shard"))


def test_a_replicate_axis_must_split_the_batch_too(mesh: DeviceMesh) -> None:
    model = fully_shard(make_model(), mesh)
    with pytest.raises(ParallelizeError, match=re.escape("TrainStep: the model itself (FSDPSequential)")):
        make_step(model, mesh, "shard")


@pytest.mark.parametrize(
    "spec", [PartitionSpec(), PartitionSpec(None, "shard"), PartitionSpec("dp"), None], ids=str
)
def test_an_array_assigned_with_another_sharding_is_named(mesh: DeviceMesh, spec: Any) -> None:
    model = fully_shard(make_model(), mesh["shard"])
    new = jnp.ones((4, 8)) if spec is None else struct((4, 8), mesh, spec)
    model.layers[0].kernel.set_value(new)
    text = "lies on 1 device(s) of no mesh" if spec is None else f"is sharded as {spec}"
    with pytest.raises(
        ParallelizeError, match=re.escape("TrainStep: layers.0.kernel, float32[4, 8]")
    ) as caught:
        make_step(model, mesh, ("dp", "shard"))
    assert "was sharded along dim 0 over ('shard',)" in str(caught.value)
    assert f"and now {text}" in str(caught.value)


def test_a_sharded_array_in_a_variable_that_was_kept_whole_is_named(mesh: DeviceMesh) -> None:
    model = fully_shard(make_model(), mesh["shard"], ignored_params=["layers.0.bias"])
    sharded = PartitionSpec("shard")
    model.layers[0].bias.set_value(struct((8,), mesh, sharded))  # ignored: the user knows
    make_step(model, mesh, ("dp", "shard"))
    model.layers[1].bias.set_value(struct((4,), mesh, sharded))
    with pytest.raises(ParallelizeError, match=re.escape("layers.1.bias, float32[4], was kept whole by")):
        make_step(model, mesh, ("dp", "shard"))


def test_a_model_sharded_over_another_mesh_is_named(mesh: DeviceMesh) -> None:
    other = init_device_mesh((8,), ("dp",))
    model = fully_shard(make_model(), other, units="layers.*")
    with pytest.raises(ParallelizeError, match=re.escape("now lies on another mesh, {'dp': 8}")):
        make_step(model, mesh, ("dp", "shard"))
