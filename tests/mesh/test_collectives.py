"""Collectives by axis name against NumPy, over axes of size 1, 2, 4 and over several axes at once."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.debug import assert_collectives
from jaxpar.mesh import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    init_device_mesh,
    permute,
    reduce,
    reduce_scatter,
    ring_shift,
    scatter,
)

MESH = init_device_mesh((2, 1, 4), ("dp", "one", "tp")).jax_mesh
AXES = ["one", "dp", "tp", ("tp", "one", "dp")]
Axis = str | tuple[str, ...]
Body = Callable[[jax.Array], jax.Array]


def _num_ranks(axis: Axis) -> int:
    names = (axis,) if isinstance(axis, str) else axis
    return int(np.prod([MESH.shape[name] for name in names]))


def _blocks(axis: Axis, shape: tuple[int, ...]) -> np.ndarray:
    """A different block for each device of the axis, stacked on a leading dim."""
    return np.random.default_rng(0).normal(size=(_num_ranks(axis), *shape)).astype(np.float32)


def _run(axis: Axis, blocks: np.ndarray, **bodies: Body) -> dict[str, np.ndarray]:
    """All bodies in one program: one block per device in, stacked results of all devices out."""
    mapped = jax.shard_map(
        lambda x: {name: body(x[0])[None] for name, body in bodies.items()},
        mesh=MESH,
        in_specs=P(axis),
        out_specs=P(axis),
    )
    return {name: np.asarray(y) for name, y in jax.jit(mapped)(blocks).items()}


def _run_invariant(axis: Axis, blocks: np.ndarray, **bodies: Body) -> dict[str, np.ndarray]:
    """The same for results that are equal on all devices: the out_spec names no axis, so their type must say so."""
    mapped = jax.shard_map(
        lambda x: {name: body(x[0]) for name, body in bodies.items()},
        mesh=MESH,
        in_specs=P(axis),
        out_specs=P(),
    )
    return {name: np.asarray(y) for name, y in jax.jit(mapped)(blocks).items()}


@pytest.mark.parametrize("axis", AXES)
def test_all_reduce_equals_numpy(axis: Axis) -> None:
    blocks, ops = _blocks(axis, (3, 2)), ("sum", "mean", "max", "min", "prod")
    found = _run_invariant(axis, blocks, **{op: lambda x, op=op: all_reduce(x, axis, op) for op in ops})
    for op in ops:
        np.testing.assert_allclose(
            found[op], getattr(np, op)(blocks, axis=0), rtol=1e-5, atol=1e-6, err_msg=op
        )


@pytest.mark.parametrize("axis", AXES)
def test_all_gather_joins_blocks_in_rank_order(axis: Axis) -> None:
    blocks = _blocks(axis, (3, 2))
    first, last = np.concatenate(list(blocks), axis=0), np.concatenate(list(blocks), axis=1)
    equal = _run_invariant(
        axis,
        blocks,
        first=lambda x: all_gather(x, axis, invariant=True),
        last=lambda x: all_gather(x, axis, dim=-1, invariant=True),
        stacked=lambda x: all_gather(x, axis, dim=-1, tiled=False, invariant=True),
    )
    np.testing.assert_array_equal(equal["first"], first)
    np.testing.assert_array_equal(equal["last"], last)
    np.testing.assert_array_equal(equal["stacked"], np.moveaxis(blocks, 0, -1))
    everywhere = _run(axis, blocks, last=lambda x: all_gather(x, axis, dim=1))["last"]
    np.testing.assert_array_equal(everywhere, np.stack([last] * len(blocks)))


@pytest.mark.parametrize("axis", AXES)
def test_reduce_scatter_is_the_part_of_the_sum(axis: Axis) -> None:
    n = _num_ranks(axis)
    blocks = _blocks(axis, (3, 2 * n))
    found = _run(
        axis,
        blocks,
        sum=lambda x: reduce_scatter(x, axis, dim=1),
        mean=lambda x: reduce_scatter(x, axis, dim=-1, op="mean"),
    )
    for op in ("sum", "mean"):
        want = np.split(getattr(np, op)(blocks, axis=0), n, axis=1)
        np.testing.assert_allclose(found[op], want, rtol=1e-5, atol=1e-6, err_msg=op)


@pytest.mark.parametrize("axis", AXES)
def test_all_gather_of_reduce_scatter_is_all_reduce(axis: Axis) -> None:
    found = _run_invariant(
        axis,
        _blocks(axis, (2 * _num_ranks(axis),)),
        both=lambda x: all_gather(reduce_scatter(x, axis), axis, invariant=True),
        once=lambda x: all_reduce(x, axis),
    )
    np.testing.assert_allclose(found["both"], found["once"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", AXES)
def test_all_to_all_transposes_the_block_matrix_and_twice_is_the_identity(axis: Axis) -> None:
    n = _num_ranks(axis)
    blocks = _blocks(axis, (2, 3 * n))
    parts = np.stack(np.split(blocks, n, axis=2))  # [part, rank, 2, 3]
    want = np.concatenate(list(parts.transpose(1, 0, 2, 3)), axis=1)  # [part, n * 2, 3]

    def there(x: jax.Array) -> jax.Array:
        return all_to_all(x, axis, split_dim=1, concat_dim=0)

    found = _run(
        axis, blocks, once=there, twice=lambda x: all_to_all(there(x), axis, split_dim=0, concat_dim=1)
    )
    np.testing.assert_array_equal(found["once"], want)
    np.testing.assert_array_equal(found["twice"], blocks)


@pytest.mark.parametrize("axis", AXES)
def test_rooted_collectives(axis: Axis) -> None:
    n = _num_ranks(axis)
    blocks, root = _blocks(axis, (2 * n,)), n - 1
    sent = _run_invariant(axis, blocks, sent=lambda x: broadcast(x, axis, root=root))["sent"]
    np.testing.assert_array_equal(sent, blocks[root])
    found = _run(
        axis,
        blocks,
        cut=lambda x: scatter(x, axis, root=root),
        joined=lambda x: gather(x, axis, root=root),
        largest=lambda x: reduce(x, axis, root=root, op="max"),
    )
    np.testing.assert_array_equal(found["cut"], np.split(blocks[root], n))
    np.testing.assert_array_equal(found["joined"][root], blocks.reshape(-1))
    np.testing.assert_array_equal(found["largest"][root], blocks.max(axis=0))
    assert not found["joined"][:root].any() and not found["largest"][:root].any()


@pytest.mark.parametrize("axis", AXES)
def test_ring_shift_moves_up_and_n_times_is_the_identity(axis: Axis) -> None:
    blocks, shifts = _blocks(axis, (3,)), (1, -1, _num_ranks(axis))
    bodies = {str(shift): lambda x, s=shift: ring_shift(x, axis, shift=s) for shift in shifts}
    found = _run(axis, blocks, **bodies)
    for shift in shifts:
        np.testing.assert_array_equal(found[str(shift)], np.roll(blocks, shift, axis=0), err_msg=str(shift))


def test_permute_fills_what_nobody_sends_to_with_zeros() -> None:
    blocks = _blocks("tp", (3,))
    found = _run(
        "tp", blocks, two=lambda x: permute(x, "tp", [(0, 3), (2, 0)]), none=lambda x: permute(x, "tp", [])
    )
    np.testing.assert_array_equal(
        found["two"], np.stack([blocks[2], 0 * blocks[0], 0 * blocks[0], blocks[0]])
    )
    assert not found["none"].any()


def test_broadcast_and_scatter_ignore_what_is_not_on_the_root() -> None:
    blocks = np.full((4, 4), np.nan, np.float32)
    blocks[1] = [1, np.inf, -2, 0]
    found = _run("tp", blocks, cut=lambda x: scatter(x, "tp", root=1), sent=lambda x: _varying_broadcast(x))
    np.testing.assert_array_equal(found["sent"], np.stack([blocks[1]] * 4))
    np.testing.assert_array_equal(found["cut"][:, 0], blocks[1])


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, jnp.bfloat16])
def test_copies_keep_the_dtype(dtype: type) -> None:
    blocks = (np.arange(16).reshape(4, 4) % 3).astype(dtype)
    found = _run("tp", blocks, cut=lambda x: scatter(x, "tp", root=1), sent=lambda x: _varying_broadcast(x))
    np.testing.assert_array_equal(found["sent"][3], blocks[1])
    np.testing.assert_array_equal(found["cut"][:, 0], blocks[1])
    assert found["sent"].dtype == found["cut"].dtype == blocks.dtype


def _varying_broadcast(x: jax.Array) -> jax.Array:
    return jax.lax.pcast(broadcast(x, "tp", root=1), "tp", to="varying")


def test_pytrees_are_mapped_leaf_by_leaf() -> None:
    tree = {"a": np.arange(8.0, dtype=np.float32), "b": (np.ones((8, 2), np.float32),)}
    f = jax.shard_map(lambda t: all_reduce(t, "tp"), mesh=MESH, in_specs=P("tp"), out_specs=P())
    found = jax.jit(f)(tree)
    np.testing.assert_array_equal(found["a"], [0 + 2 + 4 + 6, 1 + 3 + 5 + 7])
    np.testing.assert_array_equal(found["b"][0], np.full((2, 2), 4))


def test_invariant_input_is_one_equal_block_per_device() -> None:
    f = jax.shard_map(lambda x: all_reduce(x, "tp"), mesh=MESH, in_specs=P(), out_specs=P())
    np.testing.assert_array_equal(f(jnp.ones(3)), np.full(3, 4))


# Programs: which collective each function is, over each axis; nothing at all over an axis of size 1.

_BODIES: dict[str, tuple[Callable[[jax.Array, Axis], jax.Array], str]] = {
    "sum": (lambda x, a: all_reduce(x, a), "all_reduce"),
    "mean": (lambda x, a: all_reduce(x, a, "mean"), "all_reduce"),
    "max": (lambda x, a: all_reduce(x, a, "max"), "all_reduce"),
    "prod": (lambda x, a: all_reduce(x, a, "prod"), "all_gather"),
    "reduce": (lambda x, a: reduce(x, a), "all_reduce"),
    "reduce_scatter": (lambda x, a: reduce_scatter(x, a), "reduce_scatter"),
    "all_gather": (lambda x, a: all_gather(x, a), "all_gather"),
    "all_gather_invariant": (lambda x, a: all_gather(x, a, invariant=True), "all_gather"),
    "gather": (lambda x, a: gather(x, a), "all_gather"),
    "scatter": (lambda x, a: scatter(x, a), "reduce_scatter"),
    "broadcast": (lambda x, a: broadcast(x, a), "all_reduce"),
    "all_to_all": (lambda x, a: all_to_all(x, a, split_dim=0, concat_dim=1), "all_to_all"),
    "ring_shift": (lambda x, a: ring_shift(x, a), "collective_permute"),
}
_INVARIANT = ("sum", "mean", "max", "prod", "all_gather_invariant", "broadcast")


@pytest.mark.parametrize("name", _BODIES)
def test_one_collective_per_call(name: str) -> None:
    body, kind = _BODIES[name]
    axis = ("dp", "one", "tp")
    out = P() if name in _INVARIANT else P(axis)
    f = jax.shard_map(lambda x: body(x, axis), mesh=MESH, in_specs=P(axis), out_specs=out)
    assert_collectives(f, jnp.ones((64, 8)), expected={(kind, axis): 1})


def test_nothing_at_all_is_emitted_over_an_axis_of_size_one() -> None:
    invariant = lambda x: [_BODIES[name][0](x, "one") for name in _INVARIANT]  # noqa: E731
    varying = lambda x: [body(x, "one") for name, (body, _) in _BODIES.items() if name not in _INVARIANT]  # noqa: E731
    for body, out in ((invariant, P()), (varying, P("one"))):
        f = jax.jit(jax.shard_map(body, mesh=MESH, in_specs=P("one"), out_specs=out))
        hlo = f.lower(jnp.ones((8, 8))).compile().as_text() or ""
        assert not re.search(r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute", hlo)
