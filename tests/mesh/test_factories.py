"""Arrays made on the mesh: equal to the dense ones in every layout, each device making its part only (D16, D30)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar._errors import PlacementError
from jaxpar.debug import collectives
from jaxpar.mesh import (
    Partial,
    Replicate,
    Shard,
    empty,
    full,
    full_array,
    init_device_mesh,
    normal,
    ones,
    placements_of,
    redistribute,
    to_local,
    uniform,
    zeros,
)
from jaxpar.mesh._factories import _maker, _normal
from jaxpar.mesh._layout import make_layout

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS = [((8,), (S0,)), ((2, 4), (R, S1)), ((2, 4), (S1, S0)), ((4, 2), (Shard(0, after=("tp",)), S0))]
KEY = jax.random.key(7)


def mesh_of(shape):
    return init_device_mesh(shape, ("dp", "tp")[: len(shape)])


@pytest.mark.parametrize(("mesh_shape", "placements"), LAYOUTS)
def test_random_values_do_not_depend_on_the_layout(mesh_shape, placements):
    mesh = mesh_of(mesh_shape)
    x = normal(KEY, (8, 16), mesh, placements)
    assert placements_of(x) == placements
    np.testing.assert_array_equal(x, jax.random.normal(KEY, (8, 16)))


def test_replicas_are_equal_and_shards_differ():
    x = normal(KEY, (8, 16), mesh_of((2, 4)), (R, S1))
    pieces = [np.asarray(piece) for piece in to_local(x)]
    for rank in range(4):
        np.testing.assert_array_equal(pieces[rank], pieces[rank + 4])
        assert not np.array_equal(pieces[rank], pieces[(rank + 1) % 4])


def test_uniform_with_bounds():
    x = uniform(KEY, (8, 16), mesh_of((8,)), [S0], low=-2.0, high=3.0)
    np.testing.assert_array_equal(x, jax.random.uniform(KEY, (8, 16), minval=-2.0, maxval=3.0))


def test_each_device_makes_its_part_only():
    mesh = mesh_of((8,))
    layout = make_layout([S0], mesh, 2)
    maker = _maker(_normal, (256, 128), jnp.dtype(jnp.float32), mesh.jax_mesh, layout)
    assert not len(collectives(maker, KEY, mesh=mesh))
    use = maker.lower(KEY).compile().memory_analysis()
    part = 256 * 128 * 4 // 8
    assert use.output_size_in_bytes == part
    assert use.temp_size_in_bytes <= 4 * part  # the random bits of the part, not of the whole


@pytest.mark.parametrize(
    ("make", "value"),
    [(zeros, 0.0), (ones, 1.0), (empty, 0.0), (lambda *a, **k: full(a[0], 7.5, *a[1:], **k), 7.5)],
)
def test_constants(make, value):
    x = make((8, 2), mesh_of((2, 4)), (R, S0))
    assert placements_of(x) == (R, S0) and x.dtype == jnp.float32
    np.testing.assert_array_equal(x, np.full((8, 2), value))
    assert make((8,), mesh_of((8,)), [S0], dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_padded_random_values_are_the_dense_ones():
    x = normal(KEY, (5, 3), mesh_of((2, 4)), (S0, R), pad=True)
    np.testing.assert_array_equal(full_array(x), jax.random.normal(KEY, (5, 3)))
    np.testing.assert_array_equal(full_array(redistribute(x, (R, S0))), jax.random.normal(KEY, (5, 3)))


def test_terms_are_refused():
    with pytest.raises(PlacementError, match=r"normal: Partial on \('dp',\). A new value has no terms"):
        normal(KEY, (8,), mesh_of((8,)), [Partial()])
    with pytest.raises(PlacementError, match=r"full: Partial"):
        zeros((8,), mesh_of((8,)), [Partial()])
