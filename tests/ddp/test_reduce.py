"""`bucketed_all_reduce`: sums that do not depend on the buckets, and one all-reduce per bucket (rows P2, P3)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar._errors import ParallelizeError
from jaxpar.ddp import PowerSGD, bucketed_all_reduce
from jaxpar.debug import assert_collectives, collectives
from jaxpar.mesh import init_device_mesh

EACH = {"bucket_bytes": 1, "first_bucket_bytes": 1}  # one bucket per leaf
SPLIT = {"bucket_bytes": 60, "first_bucket_bytes": 40}


def _tree(num_ranks: int) -> dict[str, jax.Array]:
    """Whole multiples of 1/4, so every sum is exact in every dtype and order. Dim 0 is the rank."""
    rng = np.random.default_rng(0)

    def draw(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.asarray(rng.integers(-8, 8, (num_ranks, *shape)) / 4, dtype)

    return {
        "a": draw(3, 5),
        "b": draw(7),
        "c": draw(4, 4, dtype=jnp.bfloat16),
        "d": draw(),
        "e": draw(0, 3),
        "f": draw(2, 2, 2),
        "g": draw(5, dtype=jnp.bfloat16),
    }


def _reduced(num_ranks: int, **options: Any) -> Any:
    mesh = init_device_mesh((num_ranks,), ("dp",), devices=jax.devices()[:num_ranks]).jax_mesh
    return jax.jit(
        jax.shard_map(
            lambda tree: bucketed_all_reduce(jax.tree.map(lambda x: x[0], tree), "dp", **options),
            mesh=mesh,
            in_specs=P("dp"),
            out_specs=P(),
        )
    )


@pytest.mark.parametrize(
    ("num_ranks", "options", "num_buckets"),
    [(1, {}, 0), (2, EACH, 6), (4, {}, 2), (4, SPLIT, 3), (4, {"bucket_bytes": (1, 1000)}, 3), (4, EACH, 6)],
)
def test_sums_are_exact_with_one_all_reduce_per_bucket(
    num_ranks: int, options: dict[str, Any], num_buckets: int
) -> None:
    tree = _tree(num_ranks)
    summed = _reduced(num_ranks, **options)
    for name, value in summed(tree).items():
        assert value.dtype == tree[name].dtype
        np.testing.assert_array_equal(value, tree[name].sum(0), err_msg=name)
    table = assert_collectives(summed, tree, expected={"all_reduce": num_buckets})
    if num_buckets:
        widened = 2 * sum(
            x.nbytes for x in tree.values() if x.dtype == jnp.bfloat16
        )  # XLA:CPU sums it as float32
        plain = sum(x.nbytes for x in tree.values() if x.dtype == jnp.float32)
        assert table.bytes("all_reduce") == (widened + plain) // num_ranks


def test_result_does_not_depend_on_the_bucket_size_bitwise() -> None:
    rng = np.random.default_rng(0)
    x = {str(i): rng.normal(size=(4, 3, i + 1)).astype(np.float32) for i in range(5)}
    results = [_reduced(4, **options)(x) for options in ({}, EACH, SPLIT)]
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)


def test_mean_divides_by_the_number_of_devices() -> None:
    tree = _tree(4)
    for name, value in _reduced(4, mean=True)(tree).items():
        np.testing.assert_array_equal(value, tree[name].astype(jnp.float32).mean(0), err_msg=name)


def test_gradient_is_that_of_a_sum() -> None:
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4]).jax_mesh

    def loss(x: jax.Array) -> jax.Array:
        local = jax.shard_map(
            lambda x: bucketed_all_reduce({"w": x}, "dp")["w"], mesh=mesh, in_specs=P("dp"), out_specs=P()
        )
        return jnp.sum(jnp.sin(local(x)))

    x = jnp.arange(8.0) / 8
    np.testing.assert_allclose(
        jax.jit(jax.grad(loss))(x), jax.grad(lambda x: jnp.sin(x.reshape(4, 2).sum(0)).sum())(x), rtol=1e-6
    )


@pytest.mark.parametrize("axis", ["dp", ("dp", "cp")])
def test_a_leaf_that_is_split_over_another_axis_stays_split(axis: str | tuple[str, ...]) -> None:
    """Leaves that differ over `tp` (a column-parallel kernel) and leaves that do not are in buckets of their own."""
    mesh = init_device_mesh((2, 2, 2), ("dp", "cp", "tp")).jax_mesh
    left = () if axis == ("dp", "cp") else ("cp",)

    def local(w: jax.Array, b: jax.Array) -> dict[str, jax.Array]:
        return bucketed_all_reduce({"w": w, "b": b, "u": 2 * w}, axis)

    f = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(("dp", "cp"), "tp"), P(("dp", "cp"))),
            out_specs={"w": P(left or None, "tp"), "b": P(left or None), "u": P(left or None, "tp")},
        )
    )
    w, b = jnp.arange(32.0).reshape(4, 8), jnp.arange(12.0).reshape(4, 3)
    ranks = (2, 2) if left else (4, 1)
    out = f(w, b)
    for name, x in {"w": w, "b": b, "u": 2 * w}.items():
        np.testing.assert_array_equal(out[name], x.reshape(*ranks, -1).sum(0), err_msg=name)
    # A bucket that is equal over tp cannot wait for one that is not, so XLA may run these two as one.
    table = collectives(f, w, b, mesh=mesh)
    assert {(row.kind, row.axis) for row in table} == {("all_reduce", axis)}
    assert sum(row.num_operands for row in table) == 2
    assert table.bytes("all_reduce") == (2 * w.nbytes // 8) + b.nbytes // 4


def test_a_hook_that_keeps_state_is_refused() -> None:
    with pytest.raises(ParallelizeError, match=r"PowerSGD keeps state .* train with TrainStep"):
        bucketed_all_reduce({}, "dp", comm_hook=PowerSGD())
