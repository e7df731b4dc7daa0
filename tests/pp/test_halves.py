"""Laws of a stage's programs: F + B is `jax.grad` with nothing done twice, I + W is B, and F keeps no parameter.

Matmuls are counted in the traced programs; a stage is four layers x + silu(x @ u) @ d, eight matmuls forward. B is 5, D is 3
and H is 7, so shapes tell what an array is made of.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import _compat
from jaxpar.pp._code import StageCode, trace_stages

mark = _compat.mark_stage
ROWS, WIDTH, HIDDEN, LAYERS = 5, 3, 7, 4
Layer = Callable[[Any, Any, Any], Any]


pytestmark = pytest.mark.usefixtures("float64")


def layer(x: Any, u: Any, d: Any) -> Any:
    return x + jax.nn.silu(x @ u) @ d


def mixed_layer(x: Any, u: Any, d: Any) -> Any:
    """Computes in float32: what is kept must not be the cast parameters."""
    return x + (jax.nn.silu(x.astype(jnp.float32) @ u.astype(jnp.float32)) @ d.astype(jnp.float32)).astype(
        x.dtype
    )


def checkpointed_layer(x: Any, u: Any, d: Any) -> Any:
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(lambda x: layer(x, u, d), policy=policy)(x)


def scanned_layers(x: Any, params: Sequence[Any]) -> Any:
    stacked = jnp.stack(params[0::2]), jnp.stack(params[1::2])
    return jax.lax.scan(lambda x, ud: (layer(x, *ud), None), x, stacked)[0]


def layers(x: Any, params: Sequence[Any], body: Layer = layer) -> Any:
    for i in range(0, len(params), 2):
        x = body(x, params[i], params[i + 1])
    return x


def loss_of(run: Callable[[Any, Sequence[Any]], Any], n_stages: int) -> Callable[..., list[Any]]:
    """`whole(*params, x, y, number) -> [total]`, LAYERS layers in each stage."""

    def whole(*flat: Any) -> list[Any]:
        *params, h, y, _ = flat
        for stage in range(n_stages):
            h = mark(h, stage) if stage else h
            h = run(h, params[2 * LAYERS * stage : 2 * LAYERS * (stage + 1)])
        return [((h - y) ** 2).sum()]

    return whole


def inputs(n_stages: int) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(0)
    shapes = [(WIDTH, HIDDEN), (HIDDEN, WIDTH)] * LAYERS * n_stages
    params = [jnp.asarray(rng.normal(size=shape) * 0.3) for shape in shapes]
    return params, [*(jnp.asarray(rng.normal(size=(ROWS, WIDTH))) for _ in range(2)), jnp.int32(0)]


@functools.cache
def stages_of(run: Callable[..., Any], n_stages: int, *, remat: bool = False) -> tuple[StageCode, ...]:
    params, batch = inputs(n_stages)
    return trace_stages(loss_of(run, n_stages), params, [], batch, n_stages, remat=remat)


mixed = functools.partial(layers, body=mixed_layer)
checkpointed = functools.partial(layers, body=checkpointed_layer)


def num_matmuls(fn: Callable[..., Any], *types: Any) -> int:
    return str(jax.make_jaxpr(fn)(*types)).count(" dot_general[")


def num_equations(fn: Callable[..., Any], *types: Any) -> int:
    return len(jax.make_jaxpr(fn)(*types).jaxpr.eqns)


def types_of(code: StageCode, everything: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Arguments of F, and of B and I."""
    params = [everything[i] for i in code.params]
    given = [*(everything[i] for i in code.others), *code.received]
    return [*params, *given], [*params, *code.kept, *code.received, *code.gradients_after]


def second_types(code: StageCode, backward_types: Sequence[Any]) -> list[Any]:
    return [*(backward_types[i] for i in code.halves.second_uses), *code.halves.carry_types]


# What is computed


def test_a_stage_of_four_layers_has_16_matmuls_in_b_8_in_i_and_8_in_w() -> None:
    params, batch = inputs(3)
    code = stages_of(layers, 3)[1]
    of_f, of_b = types_of(code, [*params, *batch])
    assert num_matmuls(code.forward, *of_f) == 8
    assert num_matmuls(code.backward, *of_b) == 16
    assert num_matmuls(code.halves.first, *of_b) == 8
    assert num_matmuls(code.halves.second, *second_types(code, of_b)) == 8


@pytest.mark.parametrize("run", [layers, mixed, checkpointed, scanned_layers])
def test_each_equation_of_b_is_in_one_half(run: Any) -> None:
    params, batch = inputs(2)
    for code in stages_of(run, 2):
        of_b = types_of(code, [*params, *batch])[1]
        first = num_equations(code.halves.first, *of_b)
        second = num_equations(code.halves.second, *second_types(code, of_b))
        whole = jax.make_jaxpr(code.backward)(*of_b).jaxpr
        needed, _ = _compat.without_unused(whole, [True] * len(whole.outvars))
        assert first + second == len(needed.eqns)


@pytest.mark.parametrize("run", [layers, mixed])
def test_nothing_of_f_is_computed_again_in_b(run: Any) -> None:
    params, batch = inputs(2)
    total = 0
    for code in stages_of(run, 2):
        of_f, of_b = types_of(code, [*params, *batch])
        total += num_matmuls(code.forward, *of_f) + num_matmuls(code.backward, *of_b)
    grad = jax.grad(lambda *flat: loss_of(run, 2)(*flat)[0], argnums=range(len(params)))
    assert total == num_matmuls(grad, *params, *batch) == 8 * 2 + 15 + 16  # nobody wants the gradient of x


def test_stage_0_has_an_empty_i_and_w_does_all() -> None:
    params, batch = inputs(2)
    code = stages_of(layers, 2)[0]
    of_b = types_of(code, [*params, *batch])[1]
    assert (code.halves.num_first, code.halves.carry_types, code.gradients_before) == (0, (), ())
    assert num_equations(code.halves.first, *of_b) == 0
    assert num_matmuls(code.halves.second, *second_types(code, of_b)) == 15


def test_a_loop_that_carries_the_input_gradient_belongs_to_i_whole() -> None:
    params, batch = inputs(2)
    code = stages_of(scanned_layers, 2)[1]
    of_b = types_of(code, [*params, *batch])[1]
    assert str(jax.make_jaxpr(code.halves.second)(*second_types(code, of_b))).count(" scan[") == 0
    assert num_matmuls(code.halves.first, *of_b) == 4  # in the body of the loop, once for all layers


# What is kept


@pytest.mark.parametrize("run", [layers, mixed, checkpointed])
def test_f_keeps_nothing_made_of_parameters_alone_and_nothing_that_was_received(run: Any) -> None:
    params, batch = inputs(3)
    for code in stages_of(run, 3):
        assert {kept.shape[0] for kept in code.kept} == {ROWS}
        received = [jnp.full(t.shape, 0.123, t.dtype) for t in code.received]
        others = [batch[i - len(params)] for i in code.others]
        values = code.forward(*(params[i] for i in code.params), *others, *received)
        for kept in values[len(code.sent) + len(code.results) :]:
            assert not any(np.array_equal(kept, value) for value in received)


def test_with_remat_only_what_was_received_is_kept_and_the_forward_is_computed_again() -> None:
    params, batch = inputs(3)
    codes = stages_of(layers, 3, remat=True)
    of_b = types_of(codes[1], [*params, *batch])[1]
    assert codes[1].kept == ()
    assert num_matmuls(codes[1].backward, *of_b) == 16 + 7  # the last matmul is for what is sent
    assert [t.shape for code in codes for t in code.kept] == [
        (ROWS, WIDTH)
    ] * 2  # x, and y: rows of the batch


# What comes out


def run_all(
    codes: Sequence[StageCode], params: Sequence[Any], batch: Sequence[Any], *, in_halves: bool
) -> tuple[Any, list[Any]]:
    """Total and gradients: F of all stages, then B, or I and W, of all."""
    everything, received, stash, results = [*params, *batch], [], [], {}
    for code in codes:
        mine = [everything[i] for i in code.params]
        values = code.forward(*mine, *(everything[i] for i in code.others), *received)
        sent, rest = values[: len(code.sent)], values[len(code.sent) :]
        results |= dict(zip(code.results, rest[: len(code.results)], strict=True))
        stash.append((mine, rest[len(code.results) :], received))
        received = sent
    grads: list[Any] = [0.0] * len(params)
    after: list[Any] = []
    for code, (mine, kept, received) in reversed(list(zip(codes, stash, strict=True))):
        arguments = [*mine, *kept, *received, *after]
        if in_halves:
            first = code.halves.first(*arguments)
            before, carry = first[: code.halves.num_first], first[code.halves.num_first :]
            new = code.halves.second(*(arguments[i] for i in code.halves.second_uses), *carry)
        else:
            both = code.backward(*arguments)
            new, before = both[: len(mine)], both[len(mine) :]
        for i, g in zip(code.params, new, strict=True):
            grads[i] = grads[i] + g
        after = before
    return results[0], grads


@pytest.mark.parametrize(
    ("run", "remat"),
    [(layers, False), (layers, True), (mixed, True), (checkpointed, False), (scanned_layers, False)],
)
def test_i_then_w_is_b_exactly_and_b_is_jax_grad(run: Any, remat: bool) -> None:
    params, batch = inputs(2)
    codes = stages_of(run, 2, remat=remat)
    whole = jax.value_and_grad(lambda params: loss_of(run, 2)(*params, *batch)[0])
    expected, expected_grads = whole(params)
    total, grads = run_all(codes, params, batch, in_halves=False)
    np.testing.assert_allclose(total, expected, rtol=1e-12)
    rtol = 1e-5 if run is mixed else 1e-12
    for ours, theirs in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol)
    for ours, theirs in zip(run_all(codes, params, batch, in_halves=True)[1], grads, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def skip(w: Any, u: Any, x: Any) -> Any:
    """A skip connection over a stage, and a weight in the first and in the last."""
    h = first = x @ w
    h = mark(h, 1)
    h = mark(jnp.sin(h) * u, 2)
    return ((h + first) @ w.T).sum() + (w**2).sum()


def integers(w: Any, u: Any, x: Any) -> Any:
    """Integers and booleans cross stages; they have no gradient."""
    h = x @ w
    largest, positive = h.argmax(-1), h > 0
    h = mark(h, 1)
    h = mark(h * u, 2)
    return (jnp.take_along_axis(h, largest[:, None], 1) + jnp.where(positive, h, 0.0)).sum()


def stopped(w: Any, u: Any, x: Any) -> Any:
    """No gradient goes through the middle stage's weight, and none comes back over its second value."""
    h = x @ w
    side = jax.lax.stop_gradient(h)
    h = mark(h, 1)
    h = mark(h * jax.lax.stop_gradient(u) + side, 2)
    return (h * side).sum()


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("fn", [skip, integers, stopped])
def test_gradients_of_odd_programs(fn: Any, remat: bool) -> None:
    rng = np.random.default_rng(1)
    params = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH))), jnp.asarray(rng.normal(size=(WIDTH,)))]
    batch = [jnp.asarray(rng.normal(size=(ROWS, WIDTH))), jnp.int32(0)]
    codes = trace_stages(lambda w, u, x, _: [fn(w, u, x)], params, [], batch, 3, remat=remat)
    expected = jax.grad(lambda p: fn(*p, batch[0]))(params)
    for in_halves in (False, True):
        _, grads = run_all(codes, params, batch, in_halves=in_halves)
        for ours, theirs in zip(grads, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
