"""The table of collectives against hand counts: kind, axis, bytes, loops, and every form of program."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar._errors import CollectiveError, MeshError
from jaxpar.debug import Collective, CollectiveTable, collectives
from jaxpar.mesh import init_device_mesh

MESH = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
X = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(MESH, P("dp", "tp")))
N = 8 * 8 * 4  # bytes of one device's block of X


def _map(body: Callable[[jax.Array], jax.Array], out: P | None = None) -> Callable[[jax.Array], jax.Array]:
    return jax.shard_map(
        body, mesh=MESH, in_specs=P("dp", "tp"), out_specs=P("dp", "tp") if out is None else out
    )


def _only(table: CollectiveTable) -> Collective:
    (row,) = table
    return row


@pytest.mark.parametrize(
    ("body", "out", "kind", "axis", "operand", "result", "wire"),
    [
        (lambda x: lax.psum(x, "tp"), P("dp"), "all_reduce", "tp", N, N, 2 * N * 3 // 4),
        (lambda x: lax.pmax(x, "dp"), P(None, "tp"), "all_reduce", "dp", N, N, N),
        (lambda x: lax.psum(x, ("dp", "tp")), P(), "all_reduce", ("dp", "tp"), N, N, 2 * N * 7 // 8),
        (lambda x: lax.all_gather(x, "tp", tiled=True), P("dp", "tp"), "all_gather", "tp", N, 4 * N, 3 * N),
        (
            lambda x: lax.psum_scatter(x, "dp", tiled=True),
            P("dp", "tp"),
            "reduce_scatter",
            "dp",
            N,
            N // 2,
            N // 2,
        ),
        (
            lambda x: lax.all_to_all(x, "tp", 0, 1, tiled=True),
            P("dp", "tp"),
            "all_to_all",
            "tp",
            N,
            N,
            N * 3 // 4,
        ),
        (
            lambda x: lax.ppermute(x, "dp", [(0, 1), (1, 0)]),
            P("dp", "tp"),
            "collective_permute",
            "dp",
            N,
            N,
            N,
        ),
    ],
)
def test_kind_axis_and_bytes(
    body: Callable[[jax.Array], jax.Array],
    out: P,
    kind: str,
    axis: str | tuple[str, ...],
    operand: int,
    result: int,
    wire: int,
) -> None:
    row = _only(collectives(_map(body, out), X))
    assert (row.kind, row.axis, row.count, row.dtype, row.where) == (kind, axis, 1, "float32", "entry")
    assert (row.operand_bytes, row.result_bytes, row.wire_bytes) == (operand, result, wire)
    assert row.bytes == max(operand, result)


def test_loops_are_multiplied_out() -> None:
    def inner(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return lax.pcast(lax.psum(jnp.sin(c), "tp"), "tp", to="varying"), None

    def outer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return lax.scan(inner, lax.ppermute(c, "dp", [(0, 1), (1, 0)]), length=5)[0], None

    table = collectives(_map(lambda x: lax.scan(outer, x, length=3)[0]), X)
    assert table.count("all_reduce", "tp") == 15
    assert table.count("collective_permute", "dp") == 3
    assert table.total == 18
    assert table.bytes("all_reduce") == 15 * N
    assert {row.where for row in table} == {"loop"}


def test_unknown_trip_count_is_marked() -> None:
    def body(x: jax.Array) -> jax.Array:
        return lax.while_loop(
            lambda c: jnp.max(c) < 100, lambda c: lax.psum(c, "dp"), lax.pmax(x, ("dp", "tp"))
        )

    row = collectives(_map(body, P()), X).select("all_reduce", "dp")[0]
    assert (row.count, row.is_count_known) == (1, False)
    assert "1 x ?" in str(collectives(_map(body, P()), X))


def test_branches_of_a_conditional_are_marked() -> None:
    def body(x: jax.Array) -> jax.Array:
        summed = lambda v: lax.pcast(lax.psum(v, "tp"), "tp", to="varying")  # noqa: E731
        return lax.cond(lax.axis_index("dp") == 0, summed, lambda v: v, x)

    row = _only(collectives(_map(body), X))
    assert (row.kind, row.is_conditional) == ("all_reduce", True)


def test_combined_collective_counts_once() -> None:
    def body(x: jax.Array) -> jax.Array:
        a, b = lax.psum((x, jnp.sin(x)), "tp")
        return a * b

    table = collectives(_map(body, P("dp")), X)
    assert table.bytes("all_reduce", "tp") == 2 * N
    assert sum(row.num_operands for row in table) == 2


def test_groups_of_one_device_do_not_count() -> None:
    mesh = init_device_mesh((1, 8), ("dp", "tp")).jax_mesh
    f = jax.shard_map(lambda x: lax.psum(x, ("dp", "tp")), mesh=mesh, in_specs=P("dp", "tp"), out_specs=P())
    g = jax.shard_map(lambda x: lax.psum(x, "dp"), mesh=mesh, in_specs=P("dp", "tp"), out_specs=P(None, "tp"))
    x = jnp.ones((16, 32))
    assert collectives(g, x).total == 0
    table = collectives(f, x)
    assert table.count("all_reduce", ("dp", "tp")) == table.count("all_reduce", "tp") == 1
    assert table.count("all_reduce", "dp") == 0


def test_every_form_of_program_gives_the_same_table() -> None:
    class Step:
        def lower(self, batch: jax.ShapeDtypeStruct) -> jax.stages.Lowered:
            return jax.jit(summed).lower(batch)

    summed = _map(lambda x: lax.psum(x, "tp"), P("dp"))
    lowered = jax.jit(summed).lower(X)
    compiled = lowered.compile()
    by_args = [collectives(program, X) for program in (summed, jax.jit(summed), Step(), nnx.jit(summed))]
    by_itself = [
        collectives(lowered),
        collectives(compiled),
        collectives(compiled.as_text() or "", mesh=MESH),
        collectives(compiled, mesh=init_device_mesh((2, 4), ("dp", "tp"))["tp"]),
    ]
    for table in (*by_args, *by_itself):
        assert [(row.kind, row.axis, row.count, row.bytes) for row in table] == [("all_reduce", "tp", 1, N)]


def test_without_a_mesh_the_groups_are_shown() -> None:
    text = jax.jit(_map(lambda x: lax.psum(x, "tp"), P("dp"))).lower(X).compile().as_text() or ""
    lists = re.sub(
        r"replica_groups=(mesh\S+ \{[^}]*\}|\{.*?\}\})", "replica_groups={{0,1,2,3},{4,5,6,7}}", text
    )
    table = collectives(lists)
    assert _only(table).axis is None
    assert "(0 1 2 3) (4 5 6 7)" in str(table)
    with pytest.raises(MeshError, match="no mesh is known for it: pass mesh="):
        table.count("all_reduce", "tp")


def test_gradient_of_a_tensor_parallel_layer() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(lax.psum(jnp.tanh(x @ w), "tp") ** 2)

    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(loss)(w, x)

    f = jax.shard_map(body, mesh=MESH, in_specs=(P(None, "tp"), P("dp")), out_specs=P(None, "tp"))
    table = collectives(f, jnp.ones((8, 16)), jnp.ones((4, 8)))
    assert table.count("all_reduce", "tp") == 1  # forward; the cotangent of a psum needs no communication
    assert table.count("all_reduce", "dp") == 1  # the gradient of w, which is the same on all of dp
    assert {row.phase for row in table} == {"forward", "backward"}


def test_printing_and_data() -> None:
    table = collectives(_map(lambda x: lax.psum(x, "tp"), P("dp")), X)
    lines = str(table).splitlines()
    assert lines[0].split() == ["kind", "axis", "count", "bytes", "dtype", "operands", "sent", "where"]
    assert lines[2].split() == ["all_reduce", "tp", "1", "256", "B", "float32", "1", "384", "B", "entry"]
    (data,) = table.to_dicts()
    assert (data["kind"], data["axis"], data["bytes"], data["phase"]) == ("all_reduce", "tp", N, "")
    assert "<td>all_reduce</td>" in table._repr_html_()
    assert str(collectives(_map(jnp.sin), X)) == "no collectives"


def test_show_prints_through_rich(capsys: pytest.CaptureFixture[str]) -> None:
    collectives(_map(lambda x: lax.psum(x, "tp"), P("dp")), X).show()
    assert "all_reduce" in capsys.readouterr().out


def test_wrong_mesh_kind_axis_and_program_are_named() -> None:
    table = collectives(_map(lambda x: lax.psum(x, "tp"), P("dp")), X)
    small = jax.sharding.Mesh(MESH.devices[:1], ("dp", "tp"))
    with pytest.raises(MeshError, match=r"has 4 devices, but the program was compiled for 8"):
        collectives(_map(lambda x: lax.psum(x, "tp"), P("dp")), X, mesh=small)
    with pytest.raises(CollectiveError, match="'allreduce' is unknown. Kinds are all_reduce, all_gather"):
        table.count("allreduce")
    with pytest.raises(
        MeshError, match=r"Axis 'pp' is not in the mesh of this program; its axes are \('dp', 'tp'\)"
    ):
        table.count("all_reduce", "pp")
    with pytest.raises(TypeError, match="Cannot compile 3"):
        collectives(3)  # pyright: ignore[reportArgumentType]


def test_tpu_continuation_fusions_are_refused_not_miscounted() -> None:
    with pytest.raises(NotImplementedError, match="xla_tpu_enable_async_collective_fusion"):
        collectives(
            'HloModule m\nENTRY %e (p: f32[]) -> f32[] {\n  custom_call_target="AsyncCollectiveStart"\n}\n'
        )
