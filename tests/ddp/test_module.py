"""`DistributedDataParallel`: the same model outside a step, one all-reduce per bucket inside (rows P1, P4, P9)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.ddp import DistributedDataParallel, PowerSGD
from jaxpar.debug import assert_collectives
from jaxpar.mesh import init_device_mesh

MESH = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 5, rngs=rngs, kernel_init=nnx.initializers.uniform(0.5))
        self.norm = nnx.BatchNorm(5, rngs=rngs, momentum=0.0)
        self.last = nnx.Linear(5, 2, rngs=rngs, kernel_init=nnx.initializers.uniform(0.5))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.norm(self.first(x))))


def _net(*, train: bool = False) -> Net:
    model = Net(nnx.Rngs(0))
    return model if train else nnx.view(model, use_running_average=True)


def _grads(model: nnx.Module) -> Any:
    """x of the global batch -> gradients of the mean of squares, written by hand with shard_map."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def local(params: Any, rest: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return lax.pmean((nnx.merge(graphdef, params, rest, copy=True)(x) ** 2).mean(), "dp")

        return jax.grad(loss)(params)

    f = jax.shard_map(local, mesh=MESH.jax_mesh, in_specs=(P(), P(), P("dp")), out_specs=P())
    return jax.jit(lambda x: f(params, rest, x))


@pytest.mark.parametrize(
    ("options", "num_buckets"),
    [
        ({}, 1),
        ({"bucket_bytes": 1, "first_bucket_bytes": 1}, 6),
        ({"bucket_bytes": (8, 1000)}, 2),  # row P4: the last bias alone, then the rest
    ],
)
def test_in_a_shard_map_of_ones_own(options: dict[str, Any], num_buckets: int) -> None:
    """Gradients equal the plain model's; one all-reduce per bucket, and one for the loss written in the test."""
    grads = _grads(DistributedDataParallel(_net(), MESH, **options))
    assert_collectives(grads, X, expected={("all_reduce", "dp"): num_buckets}, mesh=MESH)
    graphdef, params, rest = nnx.split(_net(), nnx.Param, ...)
    expected = jax.jit(jax.grad(lambda p: (nnx.merge(graphdef, p, rest, copy=True)(X) ** 2).mean()))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), grads(X), expected)


def test_outside_a_step_it_is_the_plain_model() -> None:
    model = DistributedDataParallel(_net(), MESH)
    assert (type(model).__name__, isinstance(model, Net)) == ("DDPNet", True)
    np.testing.assert_array_equal(model(X), _net()(X))
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(model, X), nnx.jit(lambda m, x: m(x))(_net(), X))


def test_values_lie_on_every_device_and_stay_what_they_were() -> None:
    """Row P1: the copies are of the values before wrapping, and are copies: a step may reuse their memory."""
    plain = _net()
    before = jax.tree.map(np.array, nnx.state(plain))
    kept = plain.first.kernel.get_value()
    wrapped = DistributedDataParallel(plain, MESH)
    assert wrapped is plain
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, nnx.state(wrapped)))
    for value in jax.tree.leaves(nnx.state(wrapped)):
        assert value.sharding.is_fully_replicated and len(value.sharding.device_set) == 4
    optimizer = nnx.Optimizer(wrapped, optax.sgd(0.1), wrt=nnx.Param)
    jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), wrapped, optimizer, mesh=MESH)(X)
    assert np.isfinite(kept).all()  # not donated


def test_an_abstract_model_gets_shardings_only() -> None:
    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    DistributedDataParallel(model, MESH)
    for value in jax.tree.leaves(nnx.state(model)):
        assert isinstance(value, jax.ShapeDtypeStruct)
        assert value.sharding == jax.sharding.NamedSharding(MESH.jax_mesh, P())


def test_sharded_initialisation_gives_the_same_values() -> None:
    model = jaxpar.init_sharded(lambda: Net(nnx.Rngs(0)), lambda m: DistributedDataParallel(m, MESH))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(Net(nnx.Rngs(0))))


def test_buffers_that_differ_become_rank_0s() -> None:
    """Row P9: plain BatchNorm sees each rank's rows; what is kept are the statistics of rank 0's."""
    model = DistributedDataParallel(_net(train=True), MESH)
    optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)
    step = jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=MESH)
    assert_collectives(step, X, expected={("all_reduce", "dp"): 2})  # one bucket; loss and buffers together
    step(X)
    hidden = np.asarray(_net().first(X[:2]))
    np.testing.assert_allclose(model.norm.mean[...], hidden.mean(0), rtol=1e-5)
    np.testing.assert_allclose(model.norm.var[...], hidden.var(0), rtol=1e-4, atol=1e-6)
    for shard in model.norm.mean.get_value().addressable_shards:
        np.testing.assert_array_equal(shard.data, model.norm.mean[...])


class _Counter(nnx.Module):
    """No parameter at all."""

    def __init__(self) -> None:
        self.calls = nnx.BatchStat(jnp.zeros(()))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda: DistributedDataParallel(_net(), MESH),
            {},
            r"DDPNet is wrapped in DistributedDataParallel already",
        ),
        (_Counter, {}, r"_Counter has no nnx.Param"),
        (_net, {"bucket_bytes": 0}, r"bucket sizes must be positive, got bucket_bytes=0"),
        (_net, {"first_bucket_bytes": -1}, r"bucket sizes must be positive.*first_bucket_bytes=-1"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelizeError, match=message):
        DistributedDataParallel(make(), MESH, **options)


def test_a_hook_that_keeps_state_needs_a_train_step() -> None:
    model = DistributedDataParallel(_net(), MESH, comm_hook=PowerSGD())
    with pytest.raises(ParallelizeError, match=r"PowerSGD keeps state.*Train with TrainStep"):
        _grads(model)(X)


def test_the_mesh_of_the_wrapping_must_split_the_batch() -> None:
    mesh = init_device_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    model = DistributedDataParallel(_net(), mesh["dp"])
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(
        ParallelizeError, match=r"over the axes \('dp',\), but the step sums over \('dp', 'tp'\)"
    ):
        jaxpar.TrainStep(lambda m, x: m(x).mean(), model, optimizer, mesh=mesh, batch_axes=("dp", "tp"))
