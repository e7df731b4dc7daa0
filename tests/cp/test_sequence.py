"""Which rows lie where: split, join and positions agree with each other and with the permutation on the host."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.cp import head_tail_order, join_sequence, padded_length, sequence_positions, split_sequence
from jaxpar.cp._visits import Schedule
from jaxpar.debug import assert_collectives
from jaxpar.mesh import init_device_mesh


def mesh_of(ranks: int) -> Mesh:
    return init_device_mesh((ranks,), ("cp",), devices=jax.devices()[:ranks]).jax_mesh


@pytest.mark.parametrize("load_balanced", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("length", [16, 13])
def test_join_undoes_split_and_positions_say_which_rows(ranks: int, length: int, load_balanced: bool) -> None:
    def local(x: jax.Array) -> Any:
        part = split_sequence(x, "cp", load_balanced=load_balanced, pad_value=-1)
        back = join_sequence(part, "cp", length=length, load_balanced=load_balanced, invariant=True)
        return part, sequence_positions(length, "cp", load_balanced=load_balanced), back

    x = np.arange(2 * length * 3).reshape(2, length, 3)
    out_specs = (P(None, "cp"), P("cp"), P())
    f = jax.shard_map(local, mesh=mesh_of(ranks), in_specs=P(), out_specs=out_specs)
    part, positions, back = map(np.asarray, jax.jit(f)(x))
    padded = np.pad(x, ((0, 0), (0, positions.size - length), (0, 0)), constant_values=-1)
    assert positions.size == padded_length(length, ranks, load_balanced=load_balanced)
    assert positions.dtype == np.int32
    np.testing.assert_array_equal(part, padded[:, positions])
    np.testing.assert_array_equal(back, x)
    if load_balanced and ranks > 1:
        np.testing.assert_array_equal(positions, head_tail_order(positions.size, ranks))
    else:
        np.testing.assert_array_equal(positions, np.arange(positions.size))


def test_split_moves_nothing_and_join_gathers_once() -> None:
    mesh, x = mesh_of(4), jnp.ones((2, 16, 3))
    split = jax.shard_map(lambda x: split_sequence(x, "cp"), mesh=mesh, in_specs=P(), out_specs=P(None, "cp"))
    assert_collectives(split, x, expected={}, mesh=mesh)

    def cotangents(x: jax.Array, whole: jax.Array) -> Any:
        joined, join_vjp = jax.vjp(lambda x: join_sequence(x, "cp", invariant=True), x)
        _, split_vjp = jax.vjp(lambda whole: split_sequence(whole, "cp"), whole)
        return joined, join_vjp(whole), split_vjp(x)

    f = jax.shard_map(
        cotangents, mesh=mesh, in_specs=(P(None, "cp"), P()), out_specs=(P(), P(None, "cp"), P())
    )
    assert_collectives(f, x, x, expected={("all_gather", "cp"): 1, ("all_reduce", "cp"): 1}, mesh=mesh)
    values = jnp.arange(16.0).reshape(1, 16, 1)
    _, (joined,), (split,) = jax.jit(f)(values, values)
    order = head_tail_order(16, 4)
    np.testing.assert_array_equal(joined.ravel(), values.ravel()[order])
    np.testing.assert_array_equal(split.ravel(), values.ravel()[head_tail_order(16, 4, inverse=True)])


def test_outside_shard_map_nothing_happens() -> None:
    x = jnp.arange(7).reshape(1, 7)
    assert split_sequence(x, "cp") is x
    assert join_sequence(x, "cp") is x
    np.testing.assert_array_equal(sequence_positions(7, "cp"), np.arange(7))


def test_an_axis_that_is_not_manual_has_one_rank() -> None:
    mesh = init_device_mesh((2, 4), ("dp", "cp")).jax_mesh
    f = jax.shard_map(
        lambda x: split_sequence(x, "cp"), mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"}
    )
    assert jax.eval_shape(f, jnp.ones((2, 6))).shape == (2, 6)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("num_blocks", [2, 6])
def test_visits_are_the_visible_blocks_once_each(ranks: int, num_blocks: int) -> None:
    """Over all steps, a rank visits every block that has a visible score, once, and no other."""
    schedule = Schedule(ranks, num_blocks, block=1, causal=True, load_balanced=True)
    order = head_tail_order(ranks * num_blocks, ranks).reshape(ranks, num_blocks)
    for rank in range(ranks):
        steps = [(rank, schedule.own())]
        steps += [((rank - s) % ranks, schedule.met(rank, (rank - s) % ranks)) for s in range(1, ranks)]
        visited = [
            (int(order[rank, row]), int(order[source, key]))
            for source, visits in steps
            for row, key in zip(visits.rows, visits.keys, strict=True)
        ]
        visible = [(row, key) for row in order[rank] for key in range(row + 1)]
        assert sorted(visited) == sorted(visible)
        assert len(visited) == ranks * num_blocks**2 // 2 + num_blocks // 2
