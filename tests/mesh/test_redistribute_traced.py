"""Redistribution inside `jit`, and gradients through it (rows D13, D14)."""

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
    distribute,
    from_local,
    full_array,
    init_device_mesh,
    placements_of,
    redistribute,
)

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
DENSE = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)


def mesh24():
    return init_device_mesh((2, 4), ("dp", "tp"))


def kinds(table) -> list[str]:
    return [row.kind for row in table]


def test_inside_jit_the_partitioner_brings_it_to_the_target():
    x = distribute(DENSE, mesh24(), (S0, R))
    y = jax.jit(lambda x: redistribute(x + 1, (R, S1)))(x)
    assert placements_of(y) == (R, S1)
    np.testing.assert_array_equal(y, DENSE + 1)
    np.testing.assert_array_equal(jax.jit(full_array)(x), DENSE)


def test_inside_jit_a_named_source_runs_the_plan():
    mesh = mesh24()
    x = distribute(DENSE, mesh, (S0, R))
    move = jax.jit(lambda x: redistribute(x, (S1, R), mesh, source=(S0, R)))
    assert kinds(collectives(move, x)) == ["all_to_all"]
    y = move(x)
    assert placements_of(y) == (S1, R)
    np.testing.assert_array_equal(y, DENSE)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ((R, R), ["all_reduce"]),
        ((S1, R), ["reduce_scatter"]),
        ((R, S0), ["all_reduce"]),
        ((S0, S0), ["all_to_all"]),
    ],
)
def test_inside_jit_unreduced_arrays_say_their_source(target, expected):
    mesh = mesh24()
    x = redistribute(distribute(DENSE, mesh, (R, R)), (P, R))
    move = jax.jit(lambda x: redistribute(x, target, mesh) * 2)
    y = move(x)
    assert placements_of(y) == target
    np.testing.assert_array_equal(y, DENSE * 2)
    if target != (S0, S0):
        assert kinds(collectives(move, x)) == expected


def test_sums_of_partial_arrays_stay_partial():
    mesh = mesh24()
    x = redistribute(distribute(DENSE, mesh, (R, R)), (P, R))
    y = jax.jit(lambda x: x + x)(x)
    assert placements_of(y) == (P, R)
    np.testing.assert_array_equal(full_array(y), DENSE * 2)


def test_jax_refuses_what_is_not_linear_in_the_terms():
    x = redistribute(distribute(DENSE, mesh24(), (R, R)), (P, R))
    with pytest.raises(Exception, match=r"unreduced|non-linear"):
        jnp.exp(x)


TRANSITIONS = [
    ((S0, R), (R, R)),
    ((S0, R), (S1, R)),
    ((R, R), (S0, S1)),
    ((S0, S0), (R, S0)),
    ((S0, S1), (S1, S0)),
]


@pytest.mark.parametrize(("source", "target"), TRANSITIONS)
def test_gradients_come_back_in_the_source_placements(source, target):
    mesh = mesh24()
    weights = jnp.cos(DENSE)

    def loss(x):
        return jnp.sum(weights * redistribute(x, target) ** 2)

    x = distribute(DENSE, mesh, source)
    grad = jax.grad(loss)(x)
    assert placements_of(grad) == source
    np.testing.assert_allclose(grad, 2 * weights * DENSE, rtol=1e-6)


@pytest.mark.parametrize("named", ["source", "no source"])
def test_gradients_inside_jit(named):
    mesh = mesh24()
    before = (S0, R) if named == "source" else None

    def loss(x):
        return jnp.sum(jnp.sin(redistribute(x, (R, S1), mesh, source=before)))

    x = distribute(DENSE, mesh, (S0, R))
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), np.cos(DENSE), rtol=1e-5, atol=1e-6)


def test_the_backward_of_a_split_is_one_gather():
    mesh = mesh24()

    def back(x, grad):
        return jax.vjp(lambda x: redistribute(x, (S0, R), mesh, source=(R, R)), x)[1](grad)[0]

    x, grad = distribute(DENSE, mesh, (R, R)), distribute(DENSE, mesh, (S0, R))
    assert kinds(collectives(jax.jit(back), x, grad)) == ["all_gather"]
    np.testing.assert_array_equal(jax.jit(back)(x, grad), DENSE)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("target", [(R, R), (S1, R)])
def test_each_term_of_a_sum_gets_the_whole_gradient(target, jit):
    mesh = mesh24()
    x = from_local(lambda place: DENSE * place[0], mesh, (P, R))
    grad = jit(jax.grad(lambda x: jnp.sum(redistribute(x, target, mesh) ** 2)))(x)
    assert placements_of(grad) == (R, R)  # JAX's type for the gradient of an unreduced array
    for piece in grad.addressable_shards:
        np.testing.assert_array_equal(piece.data, 2 * DENSE)


def test_gradient_of_full_array():
    x = distribute(DENSE, mesh24(), (S0, S0))
    grad = jax.grad(lambda x: jnp.sum(full_array(x) ** 2))(x)
    assert placements_of(grad) == (S0, S0)
    np.testing.assert_array_equal(grad, 2 * DENSE)


def test_gradient_of_distribute():
    mesh = mesh24()
    grad = jax.grad(lambda x: jnp.sum(distribute(x, mesh, (S0, S1)) ** 2))(jnp.asarray(DENSE))
    np.testing.assert_array_equal(grad, 2 * DENSE)


def test_padded_gradients_and_padded_arrays_inside_jit():
    mesh = mesh24()
    value = DENSE[:5, :7]
    x = distribute(value, mesh, (S0, S0), pad=True)
    loss = lambda x: jnp.sum(full_array(x) ** 2)  # noqa: E731
    for grad in (jax.grad(loss)(x), jax.jit(jax.grad(loss))(x)):
        assert grad.placements == (S0, S0)
        np.testing.assert_array_equal(full_array(grad), 2 * value)
    np.testing.assert_array_equal(jax.jit(lambda x: full_array(redistribute(x, (S1, R))))(x), value)


def test_terms_of_a_mean_share_the_gradient():
    mesh = mesh24()
    x = from_local(lambda place: DENSE * place[0], mesh, (Partial("avg"), R))
    grad = jax.grad(lambda x: jnp.sum(full_array(x) * 3.0))(x)
    for piece in grad.array.addressable_shards:
        np.testing.assert_array_equal(piece.data, np.full_like(DENSE, 1.5))


def test_mistakes():
    mesh = mesh24()
    x = distribute(DENSE, mesh, (S0, R))
    with pytest.raises(PlacementError, match=r"does not say its mesh. Pass it"):
        jax.jit(lambda: redistribute(jnp.ones(8), [R, R]))()
    with pytest.raises(PlacementError, match=r"the plan needs the devices. Pass the mesh"):
        jax.jit(lambda x: redistribute(x, (R, R), source=(S0, R)))(x)
    with pytest.raises(PlacementError, match=r"redistribute to Partial runs outside jit only"):
        jax.jit(lambda x: redistribute(x, (P, R), mesh))(x)
    with pytest.raises(PlacementError, match=r"source=... names a Partial"):
        jax.jit(lambda x: redistribute(x, (R, R), mesh, source=(P, R)))(x)
    with pytest.raises(PlacementError, match=r"cannot be differentiated: terms of a value are not unique"):
        jax.grad(lambda x: jnp.sum(full_array(redistribute(x, (P, R)))))(distribute(DENSE, mesh, (R, R)))
    peak = from_local(lambda place: DENSE * place[0], mesh, (Partial("max"), R))
    with pytest.raises(PlacementError, match=r"from Partial\(max\) cannot be differentiated"):
        jax.grad(lambda x: jnp.sum(full_array(x)))(peak)
