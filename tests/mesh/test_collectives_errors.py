"""Every mistake in a collective is named before anything is compiled."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar._errors import CollectiveError
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

MESH = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh

_CASES: list[tuple[Callable[[jax.Array], jax.Array], str]] = [
    (
        lambda x: all_reduce(x, "dpp"),
        "all_reduce: axis 'dpp' is not a manual axis here; the enclosing shard_map has ('dp', 'tp'). Did you mean 'dp'",
    ),
    (lambda x: all_reduce(x, ("dp", "dp")), "an axis is named twice in ('dp', 'dp')"),
    (lambda x: all_reduce(x, ()), "all_reduce names no axis. Name at least one of ('dp', 'tp')"),
    (
        lambda x: all_reduce(x, "dp", "summ"),
        "op 'summ' is unknown. Ops are 'sum', 'mean', 'max', 'min', 'prod'.",
    ),
    (
        lambda x: reduce_scatter(x, "dp", op="max"),
        "reduce_scatter: op 'max' is unknown. Ops are 'sum', 'mean'.",
    ),
    (lambda x: all_reduce(x * 1j, "dp", "max"), "op 'max' of complex64: complex numbers have no order"),
    (
        lambda x: reduce_scatter({"w": x}, "tp")["w"],
        "dim 0 of w with shape (3, 2) does not divide over axis tp=4: 3 = 0 * 4 + 3. Every device gets an equal part. "
        "Choose another dim, or pad dim 0 to 4",
    ),
    (
        lambda x: scatter(x, ("dp", "tp"), dim=1),
        "dim 1 of x with shape (3, 2) does not divide over axes dp=2, tp=4",
    ),
    (lambda x: all_to_all(x, "tp", split_dim=1, concat_dim=0), "2 = 0 * 4 + 2"),
    (
        lambda x: all_to_all(x, "dp", split_dim=1, concat_dim=2),
        "concat_dim=2 of x is out of range: it has 2 dims",
    ),
    (lambda x: all_gather(x, "dp", dim=2), "dim=2 of x is out of range: it has 2 dims"),
    (lambda x: gather(x, "dp", dim=-3), "dim=-3 of x is out of range"),
    (lambda x: broadcast(x, "tp", root=4), "root=4 is not on axis tp=4, whose ranks are 0 to 3"),
    (lambda x: reduce(x, "tp", root=-1), "root=-1 is not on axis tp=4"),
    (lambda x: gather(x, "dp", root=2), "root=2 is not on axis dp=2"),
    (lambda x: scatter(x, "dp", root=2), "root=2 is not on axis dp=2"),
    (lambda x: permute(x, "tp", [(0, 1), (2, 1)]), "destination 1 is named twice in pairs=((0, 1), (2, 1))"),
    (lambda x: permute(x, "tp", [(0, 1), (0, 2)]), "source 0 is named twice"),
    (lambda x: permute(x, "tp", [(3, 4)]), "position 4 in pairs=((3, 4),) is not on the axis"),
]


@pytest.mark.parametrize(("body", "message"), _CASES, ids=[message[:40] for _, message in _CASES])
def test_mistakes_are_named(body: Callable[[jax.Array], jax.Array], message: str) -> None:
    f = jax.shard_map(body, mesh=MESH, in_specs=P("dp", "tp"), out_specs=P("dp", "tp"))
    with pytest.raises(CollectiveError, match=re.escape(message)):
        jax.eval_shape(f, jnp.ones((6, 8)))


def test_outside_shard_map_the_message_says_how_to_write_it() -> None:
    with pytest.raises(
        CollectiveError, match=r"outside shard_map.*Write jax.shard_map\(lambda x: ring_shift"
    ):
        ring_shift(jnp.ones(4), "dp")


def test_axes_that_shard_map_leaves_alone_are_not_manual() -> None:
    f = jax.shard_map(
        lambda x: all_reduce(x, "tp"), mesh=MESH, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"}
    )
    with pytest.raises(CollectiveError, match=re.escape("the enclosing shard_map has ('dp',)")):
        jax.eval_shape(f, jnp.ones(8))


def test_check_vma_false_is_refused() -> None:
    f = jax.shard_map(
        lambda x: all_reduce(x, "tp"), mesh=MESH, in_specs=P("tp"), out_specs=P(), check_vma=False
    )
    with pytest.raises(CollectiveError, match="gradients grow by the number of devices"):
        jax.eval_shape(f, jnp.ones(8))
