"""Cross entropy of split logits: equal to PyTorch's and to the dense one, two all-reduces forward, none backward."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar._errors import BatchError, CollectiveError
from jaxpar.debug import assert_collectives
from jaxpar.mesh import init_device_mesh
from jaxpar.tp import cross_entropy

CLASSES = 8
LOGITS = 3 * np.sin(1.7 * np.arange(6 * CLASSES)).reshape(6, CLASSES)
TARGETS = np.array([3, 7, -100, 0, 5, 2])
WEIGHTS = 0.5 + np.arange(CLASSES) / 4
Options = dict[str, Any]


@functools.cache
def split(
    tp: int, axis: str | tuple[str, ...] = "tp", *, own_weights: bool = False, **options: Any
) -> Callable[..., Any]:
    """`cross_entropy` as a function of whole arrays, on a mesh with another axis; jitted."""
    mesh = init_device_mesh((2, tp), ("dp", "tp"), devices=jax.devices()[: 2 * tp]).jax_mesh

    def body(z: jax.Array, y: jax.Array, w: jax.Array | None) -> Any:
        return cross_entropy(z, y, axis, class_weights=w, **options)

    specs = (P(None, axis), P(), P(axis) if own_weights else P())
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P()))


def dense(
    z: jax.Array,
    y: jax.Array,
    w: jax.Array | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Each token's loss and weight, written down from PyTorch's definition; -100 is ignored."""
    log_p, log_z = jax.nn.log_softmax(z), jax.nn.logsumexp(z, axis=-1)
    w = jnp.ones(z.shape[-1], z.dtype) if w is None else w
    own = jnp.where(y == -100, 0, w[y])
    even = jnp.where(y == -100, 0, label_smoothing / z.shape[-1])
    picked = jnp.take_along_axis(log_p, jnp.where(y == -100, 0, y)[:, None], axis=-1)[:, 0]
    return own * (z_loss * log_z**2 - (1 - label_smoothing) * picked) - even * (w * log_p).sum(-1), own


# Options, then loss (mean), loss (sum) and the sum of squares of the gradient of the mean, all of
# torch.nn.functional.cross_entropy (PyTorch 2.13, float64) of LOGITS, TARGETS and WEIGHTS as above.
_TORCH: list[tuple[Options, float, float, float]] = [
    ({}, 3.42840252776183, 17.14201263880915, 0.23749644404979928),
    ({"label_smoothing": 0.1}, 3.450814058456428, 17.254070292282137, 0.20271146424228997),
    ({"weighted": True}, 3.397263820142348, 22.93153078596085, 0.2960097374264977),
    ({"weighted": True, "label_smoothing": 0.1}, 3.4302207908196825, 23.153990338032855, 0.25198121588654576),
    (
        {"weighted": True, "label_smoothing": 0.1, "ignore_index": 5},
        3.73555134309924,
        21.47942022282063,
        0.25929362207207574,
    ),
]


@pytest.mark.parametrize(
    ("options", "mean", "total", "squares"), _TORCH, ids=[str(case[0]) for case in _TORCH]
)
def test_equals_pytorch(options: Options, mean: float, total: float, squares: float) -> None:
    options = dict(options)
    with jax.enable_x64(True):
        w = jnp.asarray(WEIGHTS) if options.pop("weighted", False) else None
        y = jnp.asarray(np.where(TARGETS == -100, 1, TARGETS) if "ignore_index" in options else TARGETS)
        (got, parts), gradient = mean_and_gradient(
            split(4, reduction="mean_parts", **options), jnp.asarray(LOGITS), y, w
        )
        np.testing.assert_allclose([got, parts.total], [mean, total], rtol=1e-12)
        np.testing.assert_allclose((gradient**2).sum(), squares, rtol=1e-12)


def mean_and_gradient(f: Callable[..., jaxpar.Mean], z: jax.Array, y: jax.Array, w: jax.Array | None) -> Any:
    """((mean, its parts), gradient)."""
    return _mean_and_gradient(f)(z, y, w)


@functools.cache
def _mean_and_gradient(f: Callable[..., jaxpar.Mean]) -> Callable[..., Any]:
    def mean(z: jax.Array, y: jax.Array, w: jax.Array | None) -> tuple[jax.Array, jaxpar.Mean]:
        parts = f(z, y, w)
        return parts.value, parts

    return jax.jit(jax.value_and_grad(mean, has_aux=True))


ALL = {"label_smoothing": 0.2, "z_loss": 0.01}


@pytest.mark.parametrize(
    ("tp", "axis", "own_weights"),
    [(1, "tp", False), (2, "tp", True), (4, "tp", False), (4, ("dp", "tp"), True)],
)
def test_equals_dense_with_all_options(tp: int, axis: str | tuple[str, ...], own_weights: bool) -> None:
    with jax.enable_x64(True):
        z, y, w, cts = jnp.asarray(LOGITS), jnp.asarray(TARGETS), jnp.asarray(WEIGHTS), jnp.arange(1.0, 7.0)
        f = split(tp, axis, own_weights=own_weights, reduction="none", **ALL)
        rows, gradient = rows_and_gradient(lambda z: f(z, y, w), z, cts)
        want, want_gradient = dense_rows_and_gradient()
        np.testing.assert_allclose(rows, want, rtol=1e-12)
        np.testing.assert_allclose(gradient, want_gradient, rtol=1e-12, atol=1e-15)


@functools.cache
def dense_rows_and_gradient() -> tuple[jax.Array, jax.Array]:
    z, y, w = jnp.asarray(LOGITS), jnp.asarray(TARGETS), jnp.asarray(WEIGHTS)
    return rows_and_gradient(lambda z: dense(z, y, w, **ALL)[0], z, jnp.arange(1.0, 7.0))


def rows_and_gradient(f: Callable[[jax.Array], jax.Array], z: jax.Array, cts: jax.Array) -> Any:
    def both(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, pull = jax.vjp(f, z)
        return rows, pull(cts)[0]

    return jax.jit(both)(z)


def test_reductions_and_global_view() -> None:
    """Outside shard_map the same call is the dense loss of whole logits."""
    z, y, w = jnp.asarray(LOGITS, jnp.float32), jnp.asarray(TARGETS), jnp.asarray(WEIGHTS, jnp.float32)

    @jax.jit
    def all_of_them(z: jax.Array) -> tuple[Any, ...]:
        loss = functools.partial(cross_entropy, z, y, "tp", class_weights=w, **ALL)
        return (
            dense(z, y, w, **ALL),
            loss(reduction="none"),
            loss(reduction="sum"),
            loss(),
            loss(reduction="mean_parts"),
        )

    (want, weights), rows, total, mean, parts = all_of_them(z)
    np.testing.assert_allclose(rows, want, rtol=1e-5)
    np.testing.assert_allclose([total, parts.total], [want.sum()] * 2, rtol=1e-5)
    np.testing.assert_allclose([mean, parts.value], [want.sum() / weights.sum()] * 2, rtol=1e-5)
    np.testing.assert_allclose(parts.count, weights.sum(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sums_are_float32_and_gradients_have_the_dtype_of_the_logits(dtype: jnp.dtype) -> None:
    z = jnp.asarray(LOGITS, dtype)
    (got, _), gradient = mean_and_gradient(split(4, reduction="mean_parts"), z, jnp.asarray(TARGETS), None)

    def mean(z: jax.Array) -> jax.Array:
        rows, weights = dense(z.astype(jnp.float32), jnp.asarray(TARGETS))
        return rows.sum() / weights.sum()

    want, want_gradient = jax.jit(jax.value_and_grad(mean))(z)
    assert (got.dtype, gradient.dtype) == (jnp.float32, dtype)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    exact = dtype == jnp.float32
    # bfloat16 has 8 bits: the last rounding alone may differ by one of 256.
    rtol, atol = (1e-5, 1e-8) if exact else (2**-7, 1e-8)
    np.testing.assert_allclose(
        gradient.astype(jnp.float32), want_gradient.astype(jnp.float32), rtol=rtol, atol=atol
    )


def test_padded_columns_have_no_probability_and_no_gradient() -> None:
    """6 classes in 8 columns: the two others may hold anything."""
    y = jnp.array([0, 5, -100, 3, 1, 2])
    z, w = (
        jnp.asarray(LOGITS, jnp.float32).at[:, 6:].set(jnp.array([1e4, jnp.nan])),
        jnp.asarray(WEIGHTS, jnp.float32),
    )
    f = split(4, reduction="mean_parts", vocab_size=6, **ALL)

    def want(z: jax.Array) -> jax.Array:
        rows, weights = dense(z, y, w[:6], **ALL)
        return rows.sum() / weights.sum()

    value, gradient = jax.jit(jax.value_and_grad(want))(z[:, :6])
    for weights in (w.at[6:].set(jnp.nan), w[:6]):
        (got, _), got_gradient = mean_and_gradient(f, z, y, weights)
        np.testing.assert_allclose(got, value, rtol=1e-5)
        np.testing.assert_allclose(got_gradient[:, :6], gradient, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(got_gradient[:, 6:], 0)


def test_ignored_tokens_and_unknown_classes() -> None:
    """A mean over no token is 0, ignored tokens may hold anything, and a target that is no class is not silent."""
    f, z = split(4, reduction="mean_parts"), jnp.asarray(LOGITS, jnp.float32)
    (nothing, _), gradient = mean_and_gradient(f, z.at[0].set(jnp.nan), jnp.full(6, -100), None)
    assert nothing == 0 and not gradient.any()
    (_, parts), gradient = mean_and_gradient(f, z, jnp.array([1, 8, -1, 2, -100, -100]), None)
    assert jnp.isnan(parts.total) and jnp.isnan(parts.count)
    assert jnp.isnan(gradient[1]).all() and jnp.isnan(gradient[2]).all() and not gradient[4:].any()


def test_masked_classes_stay_out() -> None:
    """Minus infinity is a class that cannot be; where a whole rank holds nothing else, too."""
    z = jnp.asarray(LOGITS, jnp.float32).at[:, 2:].set(-jnp.inf)
    (got, _), gradient = mean_and_gradient(split(4, reduction="mean_parts"), z, jnp.zeros(6, jnp.int32), None)
    np.testing.assert_allclose(got, jax.jit(dense)(z[:, :2], jnp.zeros(6, jnp.int32))[0].mean(), rtol=1e-5)
    np.testing.assert_array_equal(gradient[:, 2:], 0)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "vocab_size": 7}])
def test_two_all_reduces_forward_and_none_backward(options: Options) -> None:
    mesh = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh

    def body(z: jax.Array, y: jax.Array, w: jax.Array) -> Any:
        return jax.value_and_grad(lambda z: cross_entropy(z, y, "tp", class_weights=w, **options))(z)

    w = P("tp") if options else P()
    specs = {"in_specs": (P("dp", None, "tp"), P("dp"), w), "out_specs": (P("dp"), P("dp", None, "tp"))}

    def rows_of_dp(z: jax.Array, y: jax.Array, w: jax.Array) -> Any:
        loss, gradient = body(z, y, w)
        return loss[None], gradient

    batch, length = 4, 6
    tokens = batch // 2 * length
    sums = 3 * tokens + (tokens + 1 if options else 0)  # exponentials, picked, class weight; smoothing
    assert_collectives(
        jax.jit(jax.shard_map(rows_of_dp, mesh=mesh, **specs)),
        jnp.zeros((batch, length, CLASSES)),
        jnp.zeros((batch, length), jnp.int32),
        jnp.ones(CLASSES),
        expected={("all_reduce", "tp"): 2},
        bytes={"all_reduce": 4 * (tokens + sums)},
    )


def test_equal_logits_with_different_targets_get_the_sum_of_their_gradients() -> None:
    """Tokens of dp differ in their targets only."""
    mesh = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh

    def total(z: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.psum(cross_entropy(z, y, "tp", reduction="sum"), "dp")

    f = jax.shard_map(total, mesh=mesh, in_specs=(P(None, "tp"), P("dp")), out_specs=P())
    z, y = jnp.asarray(LOGITS[:3], jnp.float32), jnp.array([0, 1, 2, 3, 4, 5])
    want = jax.jit(jax.grad(lambda z: dense(jnp.tile(z, (2, 1)), y)[0].sum()))(z)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(z, y), want, rtol=1e-5, atol=1e-6)


_MISTAKES: list[tuple[Options, type[Exception], str]] = [
    ({"axis": "tpp"}, CollectiveError, "cross_entropy: axis 'tpp' is not a manual axis here"),
    (
        {"targets": (4, 3)},
        BatchError,
        "targets of shape (2, 3) do not fit logits of shape (2, 2), whose last dim is the classes. Each token has one "
        "target: shape (2,)",
    ),
    ({"targets": jnp.zeros(4)}, BatchError, "targets are float32, and classes are integers"),
    (
        {"targets_spec": P("tp")},
        BatchError,
        "targets vary over ('tp',), the axis that splits the classes, so each rank would pick another class",
    ),
    (
        {"logits_spec": P("dp")},
        CollectiveError,
        "logits of shape (2, 8) are equal on all ranks of 'tp', so they are not split over it, and their 8 classes would "
        "count 4 times",
    ),
    (
        {"class_weights": jnp.ones(5)},
        CollectiveError,
        "class_weights of shape (5,), equal on the ranks, do not fit 8 classes in 4 x 2 columns. Give all 8 of them",
    ),
    (
        {"class_weights": jnp.ones(12), "weights_spec": P("tp")},
        CollectiveError,
        "class_weights of shape (3,), different on the ranks, do not fit 8 classes in 4 x 2 columns",
    ),
    (
        {"vocab_size": 9},
        CollectiveError,
        "vocab_size=9 is not within the logits' columns, 4 ranks x 2 = 8. It is the number of classes before padding",
    ),
    ({"vocab_size": 0}, CollectiveError, "vocab_size=0 is not within the logits' columns"),
    (
        {"reduction": "average"},
        CollectiveError,
        "reduction 'average' is unknown. Reductions are 'mean', 'sum', 'none', 'mean_parts'.",
    ),
    ({"label_smoothing": 1.5}, CollectiveError, "label_smoothing=1.5 is not within 0 to 1"),
]


@pytest.mark.parametrize(("case", "error", "message"), _MISTAKES, ids=[case[2][:40] for case in _MISTAKES])
def test_mistakes_are_named(case: Options, error: type[Exception], message: str) -> None:
    options = dict(case)
    targets = options.pop("targets", (4,))
    y = jnp.zeros(targets, jnp.int32) if isinstance(targets, tuple) else targets
    axis, w = options.pop("axis", "tp"), options.pop("class_weights", jnp.ones(CLASSES))
    specs = (
        options.pop("logits_spec", P("dp", "tp")),
        options.pop("targets_spec", P("dp")),
        options.pop("weights_spec", P()),
    )
    mesh = init_device_mesh((2, 4), ("dp", "tp")).jax_mesh
    f = jax.shard_map(
        lambda z, y, w: cross_entropy(z, y, axis, class_weights=w, **options),
        mesh=mesh,
        in_specs=specs,
        out_specs=P(),
    )
    with pytest.raises(error, match=re.escape(message)):
        jax.eval_shape(f, jnp.zeros((4, CLASSES)), y, w)
