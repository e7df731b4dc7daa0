"""Stages of equal weight: by what the modules hold, compute, or take; with what comes before and after them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.pp import pipeline, plan_of
from jaxpar.pp._balance import balanced_splits
from jaxpar.pp._flops import num_flops

WIDTH, ROWS = 8, 4
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


class Net(nnx.Module):
    """A projection, layers and a head, as wide as they are asked to be."""

    def __init__(self, layers: Sequence[Any], *, before: int = 0, after: int = 0) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(before, WIDTH, use_bias=False, rngs=rngs) if before else None
        self.layers = nnx.List(layers)
        self.head = nnx.Linear(WIDTH, after, use_bias=False, rngs=rngs) if after else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


class Slow(nnx.Module):
    """Little to read in the program, which does not say how often its loop runs; long to wait for."""

    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.float32(0.1))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x * self.scale
        square = jax.lax.stop_gradient(x[:1].T @ x[:1])
        loop = jax.lax.while_loop(
            lambda carry: carry[0] < 3000,
            lambda carry: (carry[0] + 1, jnp.sin(square @ carry[1])),
            (0, square),
        )
        return x + loop[1][:1]


def linear(width: int = WIDTH) -> nnx.Module:
    return nnx.Linear(WIDTH, width, use_bias=False, rngs=nnx.Rngs(0))


def loss_fn(model: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    out = model(batch["x"])
    return jaxpar.Mean(out.sum(), jnp.float32(ROWS)), {"largest": out.max()}


def starts(model: nnx.Module, n_stages: int, balance: Any, x: Any = X) -> list[int]:
    splits = balanced_splits(model, n_stages, balance=balance, sample=(loss_fn, {"x": x}))
    assert all(point == "beginning" for _, point in splits)
    return [int(name.removeprefix("layers.")) for name, _ in splits]


def test_a_heavy_head_has_fewer_layers_beside_it() -> None:
    """Ten layers' worth of work: six layers and a head of four. By parameters of the layers: three and three."""
    model = Net([linear() for _ in range(6)], after=4 * WIDTH)
    assert starts(model, 2, "params") == [3]
    assert starts(model, 2, "flops") == [5]


def test_heavy_work_before_the_layers_has_fewer_layers_beside_it() -> None:
    model = Net([linear() for _ in range(6)], before=4 * WIDTH)
    wide = jax.ShapeDtypeStruct((ROWS, 4 * WIDTH), jnp.float32)
    assert starts(model, 2, "flops", wide) == [1]
    assert starts(Net([linear() for _ in range(6)], before=4 * WIDTH, after=4 * WIDTH), 2, "flops", wide) == [
        3
    ]


def test_thirty_layers_on_four_stages() -> None:
    found = starts(Net([linear() for _ in range(30)]), 4, "flops")
    assert sorted(np.diff([0, *found, 30])) == [7, 7, 8, 8]


def test_by_time_a_slow_layer_is_alone_that_looks_light() -> None:
    model = Net([Slow(), *[linear() for _ in range(9)]])
    assert starts(model, 2, "flops") != [1]
    with jaxpar.debug.count_compilations() as compiled:
        assert starts(model, 2, "time", np.ones(X.shape, np.float32)) == [1]
    assert compiled.count_of("jit(run)") == 3  # the first, eight that are alike, the last with the loss


def test_modules_without_work_begin_no_stage() -> None:
    model = Net([layer for _ in range(4) for layer in (linear(), nnx.Dropout(0.5, deterministic=True))])
    assert starts(model, 4, "flops") == [2, 4, 6]
    with pytest.raises(
        ParallelizeError, match=r"n_stages=6, .* only 5 modules .*'layers.6', .*n_stages=5 or fewer"
    ):
        starts(model, 6, "flops")  # the last dropout has the loss behind it


def test_a_model_without_arrays_is_weighed_by_flops_and_not_by_time() -> None:
    model = nnx.eval_shape(lambda: Net([linear() for _ in range(4)], after=4 * WIDTH))
    assert starts(model, 2, "flops") == [3]
    with pytest.raises(
        ParallelizeError, match=r'balance="time" runs the modules, and the model or the sample is abs'
    ):
        starts(model, 2, "time")


def test_the_model_is_as_it_was() -> None:
    model = Net([nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0)), linear()])
    before = jax.tree.leaves(nnx.state(model))
    starts(model, 2, "time", np.ones(X.shape, np.float32))
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))


def test_flops_are_those_of_the_matmuls() -> None:
    def fn(a: jax.Array, b: jax.Array) -> jax.Array:
        looped, _ = jax.lax.scan(lambda x, _: (x @ b, None), a, length=5)
        branched = jax.lax.cond(a[0, 0] > 0, lambda: a @ b @ b, lambda: a @ b)
        return looped + branched

    a, b = jnp.ones((3, 4)), jnp.ones((4, 4))
    matmul, others = 2 * 3 * 4 * 4, num_flops(jax.make_jaxpr(lambda a: a[0, 0] > 0)(a).jaxpr)
    found = num_flops(jax.make_jaxpr(fn)(a, b).jaxpr)
    assert 7 * matmul <= found <= 7 * matmul + others + 20
    conv = jax.make_jaxpr(
        lambda x, k: jax.lax.conv_general_dilated(
            x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    )(jnp.ones((2, 5, 5, 3)), jnp.ones((2, 2, 3, 7)))
    assert num_flops(conv.jaxpr) == 2 * (2 * 4 * 4 * 7) * (2 * 2 * 3)


def test_pipeline_takes_the_balance() -> None:
    mesh = jaxpar.init_device_mesh((2,), ("pp",), devices=jax.devices()[:2])
    model = Net([linear() for _ in range(6)], after=4 * WIDTH)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"balance": "flops"}, r"balance='flops' weighs what .* Write .*sample=\(loss_fn, batch\)"),
        ({"balance": "weight"}, 'balance=\'weight\'; write "params", "flops" or "time"'),
        (
            {"balance": "flops", "split_spec": {"layers.1": "beginning"}},
            "split_spec says where .* n_stages=2 in place",
        ),
    ]
    for options, message in refused:
        with pytest.raises(ParallelizeError, match=message):
            pipeline(model, mesh["pp"], n_microbatches=2, **options)
    pipeline(model, mesh["pp"], n_microbatches=2, balance="flops", sample=(loss_fn, {"x": X}))
    plan = plan_of(model)
    assert plan is not None and plan.splits == (("layers.5", "beginning"),)
