"""Trip counts: XLA's own, and the same number read from start, step and bound when XLA's note is missing."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.debug._hlo import Module, parse_module
from jaxpar.debug._loops import trip_count
from jaxpar.mesh import init_device_mesh

MESH = init_device_mesh((8,), ("dp",)).jax_mesh


def _summed(x: jax.Array) -> jax.Array:
    """A collective in the body: XLA:CPU moves loops without one into a computation apart."""
    return lax.pcast(lax.psum(x, "dp"), "dp", to="varying")


def _scan(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (_summed(c), None), x, length=7)[0]


def _from_two_in_steps_of_three(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[0] < 12, lambda c: (c[0] + 3, _summed(c[1])), (2, x))[1]


def _bound_included(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[0] <= 4, lambda c: (c[0] + 1, _summed(c[1])), (0, x))[1]


def _doubling(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[0] < 64, lambda c: (c[0] * 2, _summed(c[1])), (1, x))[1]


def _until_small(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: jnp.max(lax.pmax(c, "dp")) > 0.5, _summed, x)


def _compiled(function: Callable[[jax.Array], jax.Array]) -> str:
    mapped = jax.shard_map(function, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))
    return jax.jit(mapped).lower(jnp.ones(16)).compile().as_text() or ""


def _loop_count(module: Module) -> int | None:
    (found,) = [(c, i) for c in module.computations.values() for i in c.instructions if i.opcode == "while"]
    return trip_count(module, *found)


@pytest.mark.parametrize(
    ("function", "count"),
    [(_scan, 7), (_from_two_in_steps_of_three, 4), (_bound_included, 5), (_until_small, None)],
)
def test_trip_count_with_and_without_xlas_note(
    function: Callable[[jax.Array], jax.Array], count: int | None
) -> None:
    text = _compiled(function)
    assert _loop_count(parse_module(text)) == count
    without_note = re.sub(r"known_trip_count", "removed", text)
    assert ("known_trip_count" in text) == (count is not None)
    assert _loop_count(parse_module(without_note)) == count


def test_a_loop_that_does_not_count_by_steps_is_unknown() -> None:
    without_note = re.sub(r"known_trip_count", "removed", _compiled(_doubling))
    assert _loop_count(parse_module(without_note)) is None
