"""`assert_collectives` is exact in both directions, and it can fail."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar._errors import CommunicationCheckError
from jaxpar.debug import CollectiveTable, assert_collectives, collectives
from jaxpar.mesh import init_device_mesh

MESH = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
X = jnp.ones((16, 32))


def _body(x: jax.Array) -> jax.Array:
    return lax.psum(lax.ppermute(x, "tp", [(0, 1)]), "dp")


def _program(body: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return jax.shard_map(body, mesh=MESH, in_specs=P("dp", "tp"), out_specs=P(None, "tp"))


@pytest.fixture(scope="module")
def table() -> CollectiveTable:
    return collectives(_program(_body), X)


def test_exact_expectation_passes_and_returns_the_table() -> None:
    found = assert_collectives(
        _program(_body),
        X,
        expected={("all_reduce", "dp"): 1, "collective_permute": 1},
        bytes={"all_reduce": 256},
    )
    assert found.total == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"expected": {"all_reduce": 2, "collective_permute": 1}},
            "all_reduce: expected 2 executions, found 1",
        ),
        (
            {"expected": {"all_reduce": 1}},
            r"collective_permute over tp \(.*\): not expected, found 1 executions",
        ),
        ({"expected": {}}, "all_reduce over dp"),
        (
            {"expected": {("all_reduce", "tp"): 1, "collective_permute": 1}},
            "all_reduce over tp: expected 1 executions, found 0",
        ),
        (
            {"expected": {"all_reduce": 1, "collective_permute": 1, "all_gather": 1}},
            "all_gather: expected 1 executions, found 0",
        ),
        (
            {
                "expected": {"all_reduce": 1, "collective_permute": 1},
                "bytes": {("all_reduce", "dp"): 255},
            },
            "all_reduce over dp: expected 255 bytes per device, found 256",
        ),
    ],
)
def test_it_can_fail(table: CollectiveTable, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CommunicationCheckError, match=message) as caught:
        assert_collectives(table, **arguments)
    assert "collective_permute  tp" in str(caught.value)  # the whole table is shown


def test_it_is_an_assertion_error_for_pytest(table: CollectiveTable) -> None:
    with pytest.raises(AssertionError):
        assert_collectives(table, expected={})


def test_loops_that_cannot_be_counted_fail() -> None:
    def body(x: jax.Array) -> jax.Array:
        start = lax.pmax(x, ("dp", "tp"))
        return lax.while_loop(lambda c: jnp.max(c) < 100, lambda c: lax.psum(c, "dp"), start)

    f = jax.shard_map(body, mesh=MESH, in_specs=P("dp", "tp"), out_specs=P())
    with pytest.raises(
        CommunicationCheckError, match="in a loop of unknown trip count, so it cannot be counted"
    ):
        assert_collectives(f, X, expected={"all_reduce": 2})


def test_a_program_without_communication() -> None:
    assert_collectives(jnp.sin, X, expected={})
