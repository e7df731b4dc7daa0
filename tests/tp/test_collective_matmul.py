"""Rings of matmuls: equal to the collective and the matmul, in value and gradient, for the same bytes."""

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar._errors import CollectiveError
from jaxpar.debug import assert_collectives
from jaxpar.mesh import init_device_mesh
from jaxpar.tp import all_gather_matmul, matmul_reduce_scatter

BATCH, LENGTH, WIDTH, HIDDEN = 4, 8, 6, 16
Arrays = dict[str, jax.Array]


def arrays(dtype: jnp.dtype | type = jnp.float32) -> Arrays:
    random = np.random.default_rng(0)
    shapes = {
        "x": (BATCH, LENGTH, WIDTH),
        "gate": (WIDTH, HIDDEN),
        "up": (WIDTH, 2 * HIDDEN),
        "down": (HIDDEN, WIDTH),
    }
    return {name: jnp.asarray(random.normal(size=shape), dtype) for name, shape in shapes.items()}


def ring(a: Arrays, axis: str | tuple[str, ...], dim: int) -> jax.Array:
    gate, up = all_gather_matmul(a["x"], (a["gate"], a["up"]), axis, dim=dim)
    return matmul_reduce_scatter(jnp.tanh(gate) * join(up), a["down"], axis, dim=dim)


def one_device(a: Arrays) -> jax.Array:
    return (jnp.tanh(a["x"] @ a["gate"]) * join(a["x"] @ a["up"])) @ a["down"]


def join(up: jax.Array) -> jax.Array:
    """The second weight is wider: both halves count."""
    return up[..., ::2] + 2 * up[..., 1::2]


def of_blocks(
    layer: Callable[..., jax.Array], tp: int, dim: int, axis: str | tuple[str, ...] = "tp"
) -> Callable[[Arrays], jax.Array]:
    """The layer as a function of whole arrays; batch over dp, or over nothing where the ring takes all axes."""
    dp = "dp" if axis == "tp" else None
    mesh = init_device_mesh((2, tp), ("dp", "tp"), devices=jax.devices()[: 2 * tp]).jax_mesh
    x = P((dp, axis)) if dim == 0 else P(dp, axis)
    specs = {"x": x, "gate": P(None, axis), "up": P(None, axis), "down": P(axis)}
    body = functools.partial(layer, axis=axis, dim=dim)
    return jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=x)


def value_and_gradients(f: Callable[[Arrays], jax.Array], a: Arrays) -> tuple[jax.Array, Arrays]:
    def loss(a: Arrays) -> tuple[jax.Array, jax.Array]:
        y = f(a)
        return (y * jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)).sum() / y.size, y

    gradients, y = jax.jit(jax.grad(loss, has_aux=True))(a)
    return y, gradients


@functools.cache
def expected() -> tuple[jax.Array, Arrays]:
    with jax.enable_x64(True):
        return value_and_gradients(one_device, arrays(jnp.float64))


@pytest.mark.parametrize(
    ("tp", "dim", "axis"), [(1, 1, "tp"), (2, 0, "tp"), (4, 1, "tp"), (2, -2, ("dp", "tp"))]
)
def test_ring_equals_one_device(tp: int, dim: int, axis: str | tuple[str, ...]) -> None:
    with jax.enable_x64(True):
        y, gradients = value_and_gradients(of_blocks(ring, tp, dim, axis), arrays(jnp.float64))
        want_y, want = expected()
        np.testing.assert_allclose(y, want_y, rtol=1e-12, atol=1e-12)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, want[name], rtol=1e-12, atol=1e-12, err_msg=name)


def test_float32_equals_one_device() -> None:
    """To a millionth of the largest element: sums that cancel are as wrong on one device (4e-7 of it), and differ with the CPU."""
    y, gradients = value_and_gradients(of_blocks(ring, 4, 1), arrays())
    want_y, want = expected()
    for name, found, right in [("y", y, want_y), *((name, gradients[name], want[name]) for name in want)]:
        largest = np.abs(np.asarray(right)).max()
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-6 * largest, err_msg=name)


def test_bytes_are_those_of_the_collectives() -> None:
    tp, a, f = 4, arrays(), of_blocks(ring, 4, 1)
    hop_bytes = 4 * (BATCH // 2) * (LENGTH // tp) * WIDTH
    hops = 2 * (tp - 1)

    def forward_and_backward(a: Arrays, ct: jax.Array) -> tuple[jax.Array, tuple[Arrays]]:
        y, pull = jax.vjp(f, a)
        return y, pull(ct)

    assert_collectives(
        jax.jit(forward_and_backward),
        a,
        a["x"],
        expected={("collective_permute", "tp"): 2 * hops, ("all_reduce", "dp"): 1},  # weights, over the batch
        bytes={"collective_permute": 2 * hops * hop_bytes},
    )


def test_precision_and_element_type_reach_every_matmul() -> None:
    options = {"precision": "highest", "preferred_element_type": jnp.float32}
    mesh = init_device_mesh((2,), ("tp",), devices=jax.devices()[:2]).jax_mesh

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        y = all_gather_matmul(x, w, "tp", dim=0, **options)
        return matmul_reduce_scatter(y.astype(x.dtype), w.T, "tp", dim=0, **options)

    f = jax.shard_map(layer, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P("tp"))
    x, w = jnp.ones((4, 3), jnp.bfloat16), jnp.ones((3, 8), jnp.bfloat16)
    assert jax.eval_shape(f, x, w).dtype == jnp.float32
    gradients = jax.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1))
    assert [g.dtype for g in jax.eval_shape(gradients, x, w)] == [jnp.bfloat16, jnp.bfloat16]
    products = re.findall(r"dot_general\[.*?\]\s", str(jax.make_jaxpr(gradients)(x, w)), re.DOTALL)
    assert len(products) == 2 * (2 + 2 + 1)  # two steps forward, two backward, one for the weight
    assert all("HIGHEST" in each and "float32" in each for each in products)


def test_one_precision_less_in_an_operand_is_promoted() -> None:
    mesh = init_device_mesh((2,), ("tp",), devices=jax.devices()[:2]).jax_mesh
    f = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, "tp", dim=0),
        mesh=mesh,
        in_specs=(P("tp"), P(None, "tp")),
        out_specs=P(None, "tp"),
    )
    x, w = jnp.ones((4, 3), jnp.bfloat16), jnp.ones((3, 8))
    gradients = jax.eval_shape(jax.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1)), x, w)
    assert [jax.eval_shape(f, x, w).dtype, *(g.dtype for g in gradients)] == [
        "float32",
        "bfloat16",
        "float32",
    ]


_MISTAKES: list[tuple[Callable[[jax.Array, jax.Array], object], str]] = [
    (
        lambda x, w: all_gather_matmul(x, w, "tpp", dim=0),
        "all_gather_matmul: axis 'tpp' is not a manual axis here",
    ),
    (
        lambda x, w: all_gather_matmul(x, w, "tp", dim=3),
        "all_gather_matmul: dim=3 of the input is out of range: it has 3 dims",
    ),
    (
        lambda x, w: all_gather_matmul(x, w, "tp", dim=-1),
        "all_gather_matmul: dim=2 is the last dim of the input (2, 5, 6), which the matmul multiplies away. Choose a dim "
        "before it, such as the sequence: dim=1.",
    ),
    (
        lambda x, w: all_gather_matmul(x, (w, w.T), "tp", dim=1),
        "weight 1 of shape (4, 6) does not fit the input (2, 5, 6): this rank multiplies 6 features, so the weight is "
        "f32[6, ...]",
    ),
    (
        lambda x, w: all_gather_matmul(x, w[None], "tp", dim=1),
        "weight 0 of shape (1, 6, 4) does not fit the input (2, 5, 6)",
    ),
    (
        lambda x, w: all_gather_matmul(x, (), "tp", dim=1),
        "all_gather_matmul: no weight. Give at least one, f32[6, ...]",
    ),
    (
        lambda x, w: matmul_reduce_scatter(x, w, "tp", dim=1),
        "matmul_reduce_scatter: dim 1 of h with shape (2, 5, 6) does not divide over axis tp=4: 5 = 1 * 4 + 1. Every "
        "device gets an equal part. Choose another dim, or pad dim 1 to 8",
    ),
    (
        lambda x, w: matmul_reduce_scatter(x, w.T, "tp", dim=0),
        "matmul_reduce_scatter: weight 0 of shape (4, 6) does not fit the input (2, 5, 6)",
    ),
]


@pytest.mark.parametrize(("body", "message"), _MISTAKES, ids=[message[:40] for _, message in _MISTAKES])
def test_mistakes_are_named(body: Callable[[jax.Array, jax.Array], object], message: str) -> None:
    mesh = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
    f = jax.shard_map(body, mesh=mesh, in_specs=(P("dp", "tp"), P(None, "tp")), out_specs=P("dp", "tp"))
    with pytest.raises(CollectiveError, match=re.escape(message)):
        jax.eval_shape(f, jnp.ones((4, 20, 6)), jnp.ones((6, 16)))


def test_outside_shard_map_the_message_says_how_to_write_it() -> None:
    with pytest.raises(
        CollectiveError, match=r"all_gather_matmul over \('tp',\) is called outside shard_map"
    ):
        all_gather_matmul(jnp.ones((2, 3)), jnp.ones((3, 2)), "tp", dim=0)
