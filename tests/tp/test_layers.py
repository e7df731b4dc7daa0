"""Every layer that can be split, as a pair: by columns, then by rows; value and all gradients equal one device's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.cp import join_sequence, split_sequence
from jaxpar.mesh import DeviceMesh, Partial, Replicate, Shard, init_device_mesh
from jaxpar.tp import (
    AttentionParallel,
    ColwiseParallel,
    ContextParallel,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    column_linear,
    parallelize_module,
    row_linear,
    vocab_embedding,
)


class Pair(nnx.Module):
    """Two layers with something between them that treats every element alone."""

    def __init__(self, first: nnx.Module, second: nnx.Module) -> None:
        self.first, self.second = first, second

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)))


class Tied(nnx.Module):
    def __init__(self, embed: nnx.Embed) -> None:
        self.embed = embed

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.embed.attend(jnp.tanh(self.embed(ids)))


def rngs(seed: int = 0) -> nnx.Rngs:
    return nnx.Rngs(seed)


def noisy_bias(module: Any) -> Any:
    """Biases start at zero, where a bias that is added twice is not seen."""
    for path, variable in nnx.iter_graph(module):
        if path and path[-1] == "bias" and variable is not None and not isinstance(variable, nnx.Module):
            shape = variable.get_value().shape
            variable.set_value(jax.random.normal(jax.random.key(3), shape))
    return module


IDS = jnp.array([[0, 5, 7, 2], [1, 1, 6, 3]])
X = jax.random.normal(jax.random.key(1), (2, 4, 4))
PAIRS = {
    "Linear": (lambda: Pair(nnx.Linear(4, 8, rngs=rngs()), nnx.Linear(8, 4, rngs=rngs())), X),
    "LinearGeneral": (
        lambda: Pair(
            nnx.LinearGeneral(4, (4, 3), rngs=rngs()),
            nnx.LinearGeneral((4, 3), 5, axis=(-2, -1), rngs=rngs()),
        ),
        X,
    ),
    "Einsum": (
        lambda: Pair(
            nnx.Einsum("btd,dhe->bthe", (4, 4, 3), (4, 3), rngs=rngs()),
            nnx.Einsum("bthe,hed->btd", (4, 3, 5), (5,), rngs=rngs()),
        ),
        X,
    ),
    "Conv": (
        lambda: Pair(nnx.Conv(4, 8, (3,), rngs=rngs()), nnx.Conv(8, 4, (3,), rngs=rngs())),
        X,
    ),
    "Embed": (lambda: Pair(nnx.Embed(8, 4, rngs=rngs()), nnx.Linear(4, 3, rngs=rngs())), IDS),
}


def on_ranks(model: nnx.Module, mesh: DeviceMesh, x: jax.Array, out_spec: P | None = None) -> Any:
    """Output and gradients of all parameters and of x, of a sum that weighs every element of the output differently."""
    graphdef, state = nnx.split(model)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state)

    def local(state: Any, x: jax.Array) -> Any:
        def loss(state: Any, x: jax.Array) -> Any:
            y = nnx.merge(graphdef, state)(x)
            part = (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum()
            return part, y

        is_real = jnp.issubdtype(x.dtype, jnp.floating)
        (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1) if is_real else 0, has_aux=True)(state, x)
        return y, grads

    grad_specs = (specs, P()) if jnp.issubdtype(x.dtype, jnp.floating) else specs
    ran = jax.shard_map(
        local, mesh=mesh.jax_mesh, in_specs=(specs, P()), out_specs=(out_spec or P(), grad_specs)
    )
    return jax.jit(ran)(state, x)


def assert_equal(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * max(1.0, np.abs(b).max()))


def on_mesh(model: nnx.Module, mesh: DeviceMesh) -> nnx.Module:
    """With no plan at all: everything replicated."""
    state = jax.device_put(nnx.state(model), jax.NamedSharding(mesh.jax_mesh, P()))
    nnx.update(model, state)
    return model


@pytest.fixture(scope="module")
def dense() -> dict[str, Any]:
    mesh = init_device_mesh((1,), ("tp",), devices=jax.devices()[:1])
    return {kind: on_ranks(on_mesh(noisy_bias(make()), mesh), mesh, x) for kind, (make, x) in PAIRS.items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", PAIRS)
def test_columns_then_rows_equal_one_device(kind: str, num_ranks: int, dense: Any) -> None:
    mesh = init_device_mesh((num_ranks,), ("tp",), devices=jax.devices()[:num_ranks])
    make, x = PAIRS[kind]
    model = noisy_bias(make())
    on_mesh(model, mesh)
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})

    assert_equal(on_ranks(model, mesh, x), dense[kind])
    # In global view it is the plain model.
    np.testing.assert_allclose(model(x), dense[kind][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("style", [RowwiseParallel(), ColwiseParallel(output_layouts=Replicate())])
def test_a_tied_embedding_split_either_way_equals_one_device(style: Any) -> None:
    mesh = init_device_mesh((4,), ("tp",), devices=jax.devices()[:4])
    expected = on_ranks(on_mesh(Tied(nnx.Embed(8, 4, rngs=rngs())), mesh), mesh, IDS)
    model = parallelize_module(Tied(nnx.Embed(8, 4, rngs=rngs())), mesh, {"embed": style})
    ours = on_ranks(on_mesh_rest(model, mesh), mesh, IDS)
    assert_equal(ours, expected)


def on_mesh_rest(model: nnx.Module, mesh: DeviceMesh) -> nnx.Module:
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable) and not isinstance(
            variable.get_value().sharding, jax.NamedSharding
        ):
            variable.set_value(jax.device_put(variable.get_value(), jax.NamedSharding(mesh.jax_mesh, P())))
    return model


def test_outputs_end_where_they_are_asked_to() -> None:
    mesh = init_device_mesh((2,), ("tp",), devices=jax.devices()[:2])
    expected, _ = on_ranks(on_mesh(nnx.Linear(4, 8, rngs=rngs()), mesh), mesh, X)
    for style, out_spec in (
        (ColwiseParallel(), P(None, None, "tp")),
        (ColwiseParallel(output_layouts=Replicate()), P()),
        (ColwiseParallel(output_layouts=Shard(1)), P(None, "tp")),
        (RowwiseParallel(input_layouts=Replicate()), P()),
        (RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)), P("tp")),
    ):
        model = parallelize_module(nnx.Linear(4, 8, rngs=rngs()), mesh, style)
        y, _ = on_ranks(on_mesh_rest(model, mesh), mesh, X, out_spec=out_spec)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


class Gated(nnx.Module):
    """Norm, two layers that read the same array, dropout-free; sequence in dim 1."""

    def __init__(self) -> None:
        self.norm = nnx.RMSNorm(4, rngs=rngs())
        self.gate, self.up = nnx.Linear(4, 8, rngs=rngs(1)), nnx.Linear(4, 8, rngs=rngs(2))
        self.down = nnx.Linear(8, 4, rngs=rngs(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        x_norm = self.norm(x)
        return x + self.down(jax.nn.silu(self.gate(x_norm)) * self.up(x_norm))


class Identity(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


# What is whole outside is split along the sequence inside.
SPLIT_INSIDE = PrepareModuleInputOutput(
    input_layouts=Replicate(),
    desired_input_layouts=Shard(1),
    output_layouts=Shard(1),
    desired_output_layouts=Replicate(),
)


class RematGated(Gated):
    """Computed again in the backward, collectives too."""

    __call__ = nnx.remat(Gated.__call__)


@pytest.mark.parametrize(
    ("num_ranks", "overlap", "kind"), [(2, False, Gated), (4, False, RematGated), (4, True, Gated)]
)
def test_sequence_parallel_equals_one_device(num_ranks: int, overlap: bool, kind: type[Gated]) -> None:
    mesh = init_device_mesh((num_ranks,), ("tp",), devices=jax.devices()[:num_ranks])
    make = lambda: on_mesh(noisy_bias(Pair(nnx.Sequential(kind()), Identity())), mesh)  # noqa: E731
    plan = {
        "first": SPLIT_INSIDE,
        "**.norm": SequenceParallel(),
        "**.gate": ColwiseParallel(input_layouts=Shard(1), overlap=overlap),
        "**.up": ColwiseParallel(input_layouts=Shard(1), overlap=overlap),
        "**.down": RowwiseParallel(output_layouts=Shard(1), overlap=overlap),
    }
    ours = on_ranks(parallelize_module(make(), mesh, plan), mesh, X)
    assert_equal(ours, on_ranks(make(), mesh, X))


@pytest.mark.parametrize("layout", [Replicate(), Shard(1)])
def test_multi_head_attention_equals_one_device(layout: Any) -> None:
    mesh = init_device_mesh((4,), ("tp",), devices=jax.devices()[:4])
    make = lambda: on_mesh(  # noqa: E731
        noisy_bias(
            Pair(nnx.Sequential(nnx.MultiHeadAttention(4, 4, 8, decode=False, rngs=rngs())), Identity())
        ),
        mesh,
    )
    plan = {"first.layers.0": AttentionParallel(input_layouts=layout, output_layouts=layout)}
    plan |= {} if layout == Replicate() else {"first": SPLIT_INSIDE}
    ours = on_ranks(parallelize_module(make(), mesh, plan), mesh, X)
    assert_equal(ours, on_ranks(make(), mesh, X))


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_over_a_split_sequence_equals_one_device(is_causal: bool) -> None:
    mesh = init_device_mesh((4,), ("cp",), devices=jax.devices()[:4])
    attention = on_mesh(noisy_bias(nnx.MultiHeadAttention(2, 4, 8, decode=False, rngs=rngs())), mesh)
    x = jax.random.normal(jax.random.key(5), (2, 16, 4))
    expected = attention(x, is_causal=is_causal)
    parallelize_module(attention, mesh, ContextParallel(rotate="ppermute"))
    np.testing.assert_allclose(attention(x, is_causal=is_causal), expected, rtol=1e-5, atol=1e-6)

    def local(x: jax.Array) -> jax.Array:
        y = attention(split_sequence(x, "cp"), is_causal=is_causal)
        return join_sequence(y, "cp", invariant=True)

    ours = jax.jit(jax.shard_map(local, mesh=mesh.jax_mesh, in_specs=P(), out_specs=P()))(x)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


class GroupedQuery(nnx.Module):
    """Four query heads, two key/value heads, as layers of their own; head counts are read from what arrives."""

    def __init__(self) -> None:
        self.q, self.k, self.v = (nnx.Linear(4, n * 2, rngs=rngs(n)) for n in (4, 2, 2))
        self.out = nnx.Linear(8, 4, rngs=rngs(7))

    def __call__(self, x: jax.Array) -> jax.Array:
        B, T, _ = x.shape
        q, k, v = (f(x).reshape(B, T, -1, 2) for f in (self.q, self.k, self.v))
        return self.out(jax.nn.dot_product_attention(q, k, v).reshape(B, T, -1))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_grouped_queries_with_fewer_key_heads_than_ranks_equal_one_device(num_ranks: int) -> None:
    """Case TP-2."""
    mesh = init_device_mesh((num_ranks,), ("tp",), devices=jax.devices()[:num_ranks])
    make = lambda: on_mesh(noisy_bias(GroupedQuery()), mesh)  # noqa: E731
    plan = {
        "q": ColwiseParallel(heads=4),
        "[kv]": ColwiseParallel(heads=2, replicate_heads=True),
        "out": RowwiseParallel(),
    }
    ours = on_ranks(parallelize_module(make(), mesh, plan), mesh, X)
    assert_equal(ours, on_ranks(make(), mesh, X))


def test_terms_of_a_sum_are_summed_by_the_module_around_and_the_bias_once() -> None:
    mesh = init_device_mesh((2,), ("tp",), devices=jax.devices()[:2])
    around = PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate())

    class Inner(nnx.Module):
        def __init__(self) -> None:
            self.inner = nnx.Linear(4, 4, rngs=rngs())

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.inner(x)

    make = lambda: on_mesh(noisy_bias(Pair(nnx.Linear(4, 4, rngs=rngs()), Inner())), mesh)  # noqa: E731
    plan = {
        "first": ColwiseParallel(),
        "second.inner": RowwiseParallel(output_layouts=Partial()),
        "second": around,
    }
    ours = on_ranks(parallelize_module(make(), mesh, plan), mesh, X)
    assert_equal(ours, on_ranks(make(), mesh, X))


def test_the_pure_functions_equal_the_dense_layers() -> None:
    mesh = init_device_mesh((4,), ("tp",), devices=jax.devices()[:4])
    keys = jax.random.split(jax.random.key(0), 4)
    table, w1 = jax.random.normal(keys[0], (8, 4)), jax.random.normal(keys[1], (4, 8))
    b1, w2 = jax.random.normal(keys[2], (8,)), jax.random.normal(keys[3], (8, 4))
    b2 = jnp.arange(4.0)
    params, specs = (table, w1, b1, w2, b2), (P("tp"), P(None, "tp"), P("tp"), P("tp"), P())

    def split(table, w1, b1, w2, b2):
        x = vocab_embedding(IDS, table, axis="tp")
        y = row_linear(jnp.tanh(column_linear(x, w1, b1, axis="tp")), w2, b2, axis="tp")
        return (y * jnp.cos(y)).sum()

    def dense(table, w1, b1, w2, b2):
        y = jnp.tanh(table[IDS] @ w1 + b1) @ w2 + b2
        return (y * jnp.cos(y)).sum()

    every = tuple(range(5))
    ours = jax.jit(
        jax.shard_map(
            jax.value_and_grad(split, argnums=every),
            mesh=mesh.jax_mesh,
            in_specs=specs,
            out_specs=(P(), specs),
        )
    )(*params)
    assert_equal(ours, jax.value_and_grad(dense, argnums=every)(*params))
