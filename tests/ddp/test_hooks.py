"""Communication hooks: who divides, what is on the wire, and how far the result is off (rows P18, P30, P31; DDP-3)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.ddp import (
    DistributedDataParallel,
    GradBucket,
    PowerSGD,
    allreduce_hook,
    bf16_compress_hook,
    bucketed_all_reduce,
    fp16_compress_hook,
)
from jaxpar.debug import collectives
from jaxpar.mesh import init_device_mesh

MESH = init_device_mesh((2,), ("dp",), devices=jax.devices()[:2])


def _summed(hook: Any, **options: Any) -> Any:
    return jax.jit(
        jax.shard_map(
            lambda x: bucketed_all_reduce({"x": x[0]}, "dp", comm_hook=hook, **options)["x"],
            mesh=MESH.jax_mesh,
            in_specs=P("dp"),
            out_specs=P(),
        )
    )


class _Scale(nnx.Module):
    """y = w x: the gradient of its mean is the mean of x."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.w[...] * x


def _gradient(hook: Any, x: list[float]) -> jax.Array:
    """The gradient that a training step takes: the parameter after SGD with rate 1 from 0, negated."""
    model = DistributedDataParallel(_Scale(), MESH, comm_hook=hook)
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    step = jaxpar.TrainStep(lambda m, b: m(b).mean(), model, optimizer, mesh=MESH)
    step(np.array(x, np.float32))
    return -model.w[...]


def test_fp16_divides_before_it_sums() -> None:
    """DDP-3 a: 40000 + 40000 is above float16's largest number, their mean is not."""
    assert float(_gradient(fp16_compress_hook, [40000.0, 40000.0])) == 40000.0


def test_a_hook_must_not_divide() -> None:
    """DDP-3 b: the contributions' sum is the mean already, with a hook as without."""

    def my_hook(bucket: GradBucket) -> tuple[jax.Array, ...]:
        return bucket.all_reduce(bucket.gradients)

    assert float(_gradient(allreduce_hook, [2.0, 6.0])) == 4.0
    assert float(_gradient(my_hook, [2.0, 6.0])) == 4.0


def test_gradients_come_back_in_their_own_dtype() -> None:
    """DDP-3 c."""
    gradient = _gradient(bf16_compress_hook, [1.0, 2.0 + 2**-9])
    assert gradient.dtype == jnp.float32
    assert abs(float(gradient) - (1.5 + 2**-10)) <= 2**-8 * 1.5


@pytest.mark.parametrize(("hook", "bound"), [(bf16_compress_hook, 2**-8), (fp16_compress_hook, 2**-11)])
def test_error_of_a_cast_is_bounded_per_element(hook: Any, bound: float) -> None:
    """Two ranks: each contribution is rounded, and so is their sum; every rounding is within the bound."""
    x = np.exp(np.random.default_rng(0).uniform(-3, 3, (2, 1000))).astype(
        np.float32
    )  # one sign: no cancellation
    exact = x.astype(np.float64).sum(0)
    error = np.abs(np.asarray(_summed(hook)(x), np.float64) - exact) / exact
    assert bound / 2 < error.max() <= (1 + bound) ** 2 - 1


@pytest.mark.parametrize(
    ("hook", "dtype", "widened"),
    [(allreduce_hook, "f32", 1), (bf16_compress_hook, "bf16", 2), (fp16_compress_hook, "f16", 1)],
)
def test_bytes_on_the_wire(hook: Any, dtype: str, widened: int) -> None:
    """XLA:CPU sums bfloat16 as float32: there the compiled program has twice the bytes of the one we wrote."""
    summed, x = _summed(hook), jnp.ones((2, 32))
    written = [
        line for line in summed.lower(x).as_text().splitlines() if f"}}) : (tensor<32x{dtype}>) -> " in line
    ]
    assert len(written) == 1
    size = {"f32": 4, "bf16": 2, "f16": 2}[dtype]
    assert collectives(summed, x, mesh=MESH).bytes("all_reduce", "dp") == 32 * size * widened


def test_identity_hook_equals_no_hook_bitwise() -> None:
    x = np.random.default_rng(0).normal(size=(2, 100)).astype(np.float32)
    np.testing.assert_array_equal(
        _summed(lambda bucket: list(bucket.all_reduce(bucket.gradients)))(x), x[0] + x[1]
    )


def test_a_hook_sees_its_bucket() -> None:
    seen: list[tuple[Any, ...]] = []

    def spy(bucket: GradBucket) -> tuple[jax.Array, ...]:
        seen.append(
            (bucket.index, bucket.is_last, bucket.axes, bucket.num_ranks, [g.shape for g in bucket.gradients])
        )
        return allreduce_hook(bucket)

    tree = {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 4)), "c": jnp.ones((2, 5))}
    body = jax.shard_map(
        lambda t: bucketed_all_reduce(t, "dp", comm_hook=spy, bucket_bytes=1000, first_bucket_bytes=1),
        mesh=MESH.jax_mesh,
        in_specs=P("dp"),
        out_specs=P(),
    )
    jax.eval_shape(body, tree)
    assert seen == [(0, False, ("dp",), 2, [(1, 5)]), (1, True, ("dp",), 2, [(1, 4), (1, 3)])]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda bucket: bucket.gradients, r"differ from rank to rank of \['dp'\]"),
        (lambda bucket: (), r"returned nothing for a bucket of float32\[4\]"),
        (
            lambda bucket: tuple(x.astype(jnp.bfloat16) for x in allreduce_hook(bucket)),
            r"returned bfloat16\[4\] for a bucket of float32\[4\]",
        ),
    ],
)
def test_what_is_no_sum_is_refused(hook: Any, message: str) -> None:
    with pytest.raises(ParallelizeError, match=message + r".*return bucket.all_reduce\(bucket.gradients\)"):
        _summed(hook)(jnp.ones((2, 4)))


@pytest.mark.parametrize("hook", ["bf16", PowerSGD])
def test_what_is_no_hook_is_refused_at_wrapping(hook: Any) -> None:
    with pytest.raises(ParallelizeError, match=r"comm_hook=.*pass a function|comm_hook=.*Pass a function"):
        DistributedDataParallel(_Scale(), MESH, comm_hook=hook)
