"""k training steps on n devices equal k steps on one device with the whole batch (row P2, cases DDP-2 and DDP-4).

The reference knows nothing of jaxpar: `jax.value_and_grad` and optax on one device.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.data import pad_batch
from jaxpar.ddp import DistributedDataParallel, convert_sync_batchnorm
from jaxpar.debug import assert_collectives, count_compilations
from jaxpar.mesh import init_device_mesh

EACH = {"bucket_bytes": 1, "first_bucket_bytes": 1}  # one bucket per parameter


def _mesh(num_ranks: int) -> Any:
    return init_device_mesh((num_ranks,), ("dp",), devices=jax.devices()[:num_ranks])


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def _filled(make: Callable[[], nnx.Module], dtype: Any = np.float32) -> nnx.Module:
    """The module with numbers from NumPy: initializers would take longer to compile than the step."""
    graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.uniform(-0.5, 0.5, x.shape), dtype), params)
    rest = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), rest)  # BatchNorm's statistics
    return nnx.merge(graphdef, params, rest)


def _mlp() -> nnx.Module:
    return nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(8, 2, rngs=nnx.Rngs(0)))


class ConvNet(nnx.Module):
    """A residual block in small: convolution, BatchNorm, skip connection."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(1, 4, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs, momentum=0.9)
        self.conv = nnx.Conv(4, 4, (3, 3), use_bias=False, rngs=rngs)
        self.conv_norm = nnx.BatchNorm(4, rngs=rngs, momentum=0.9, use_fast_variance=False)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.norm(self.stem(x)))
        x = jnp.tanh(x + self.conv_norm(self.conv(x)))
        return self.head(x.mean((1, 2)))


class Block(nnx.Module):
    """A decoder block in small: causal attention, MLP, tied embedding."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.qkv = nnx.Linear(8, 24, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(8, 8, rngs=rngs)
        self.mlp = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        q, k, v = jnp.split(self.qkv(self.norm(x)), 3, axis=-1)
        causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        scores = jax.nn.softmax(jnp.where(causal, q @ k.swapaxes(1, 2), -1e9))
        x = x + self.out(scores @ v)
        return self.embed.attend(x + jnp.tanh(self.mlp(x)))


def _weighted_squares(model: Any, b: Any) -> Any:
    losses = ((model(b["x"]) - b["y"]) ** 2).mean(-1)
    return jaxpar.Mean((losses * b["w"]).sum(), b["w"].sum())


def _squares(model: Any, b: Any) -> Any:
    return ((model(b["x"]) - b["y"]) ** 2).mean()


def _next_token(model: Any, b: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(b["x"]), b["y"])
    real = b["y"] != 0  # 0 is padding: ranks hold different numbers of labels
    return jaxpar.Mean((losses * real).sum(), real.sum())


@dataclass(frozen=True)
class Case:
    make: Callable[[], nnx.Module]
    loss: Callable[[Any, Any], Any]
    batches: list[Any]
    tx: Any
    options: Any
    dtype: Any = np.float32
    fill: bool = True

    def model(self) -> nnx.Module:
        return _filled(self.make, self.dtype) if self.fill else self.make()


def _weighted_batches() -> list[Any]:
    """Three batches of 8; the last one has 5 samples, the rest is padding with weight 0."""
    rows = [
        {"x": _normal(8, 4) + i, "y": _normal(8, 2) - i, "w": np.arange(1, 9, dtype=np.float32)}
        for i in range(3)
    ]
    last, mask = pad_batch(jax.tree.map(lambda x: x[:5], rows[2]), 8)
    return [*rows[:2], last | {"w": last["w"] * mask}]


def _token_batches() -> list[Any]:
    tokens = np.random.default_rng(0).integers(1, 11, (3, 8, 6))
    tokens[:, np.arange(8)[:, None] % 5 < np.arange(6) - 1] = 0
    return [{"x": t[:, :-1], "y": t[:, 1:]} for t in tokens]


CASES = {
    "mlp": Case(_mlp, _weighted_squares, _weighted_batches(), optax.adamw(0.01), EACH),
    "convnet": Case(
        ConvNet,
        _squares,
        [{"x": _normal(8, 4, 4, 1) * i, "y": _normal(8, 2)} for i in (1, 2, 3)],
        optax.sgd(0.1),
        {},
    ),
    "block": Case(Block, _next_token, _token_batches(), optax.sgd(0.1, momentum=0.9), {"bucket_bytes": 400}),
}


def _real_rows(batch: Any) -> Any:
    """Without the rows that only pad."""
    return jax.tree.map(lambda x: x[batch["w"] > 0], batch) if "w" in batch else batch


def _on_one_device(case: Case, batches: list[Any]) -> tuple[list[float], Any]:
    """Losses and the final state of the model."""
    graphdef, params, rest = nnx.split(case.model(), nnx.Param, ...)
    opt_state = case.tx.init(params)

    @jax.jit
    def step(params: Any, rest: Any, opt_state: Any, batch: Any) -> Any:
        def objective(params: Any) -> Any:
            model = nnx.merge(graphdef, params, rest, copy=True)
            loss = case.loss(model, batch)
            return loss.total / loss.count if isinstance(loss, jaxpar.Mean) else loss, nnx.split(
                model, nnx.Param, ...
            )[2]

        (loss, rest), grads = jax.value_and_grad(objective, has_aux=True)(params)
        updates, opt_state = case.tx.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), rest, opt_state

    losses = []
    for batch in batches:
        loss, params, rest, opt_state = step(params, rest, opt_state, _real_rows(batch))
        losses.append(float(loss))
    return losses, nnx.state(nnx.merge(graphdef, params, rest))


def _step(case: Case, num_ranks: int, **options: Any) -> tuple[jaxpar.TrainStep, nnx.Module]:
    mesh, model = _mesh(num_ranks), case.model()
    if isinstance(model, ConvNet):
        convert_sync_batchnorm(model, mesh)
    DistributedDataParallel(model, mesh, **case.options)
    optimizer = nnx.Optimizer(model, case.tx, wrt=nnx.Param)
    return jaxpar.TrainStep(case.loss, model, optimizer, mesh=mesh, **options), model


def _assert_equal(model: nnx.Module, expected: Any, *, rtol: float = 1e-6) -> None:
    """Within `rtol` of the largest number of each array."""
    got = dict(nnx.to_flat_state(nnx.state(model)))
    for path, value in nnx.to_flat_state(expected):
        want = np.asarray(value.get_value())
        np.testing.assert_allclose(
            got[path].get_value(), want, rtol=rtol, atol=rtol * np.abs(want).max(initial=0), err_msg=str(path)
        )


@functools.cache
def _reference(name: str) -> tuple[list[float], Any]:
    return _on_one_device(CASES[name], CASES[name].batches)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", list(CASES))
def test_three_steps_equal_one_device(name: str, num_ranks: int) -> None:
    case, (losses, expected) = CASES[name], _reference(name)
    step, model = _step(case, num_ranks)
    np.testing.assert_allclose([float(step(b)["loss"]) for b in case.batches], losses, rtol=1e-6)
    _assert_equal(model, expected)


def test_accumulation_with_weights_equals_one_device() -> None:
    """Four parts (2 ranks x 2 microbatches) with different total weights; still one reduction."""
    case, (losses, expected) = CASES["mlp"], _reference("mlp")
    step, model = _step(case, 2, accumulate=2)
    assert_collectives(step, case.batches[0], expected={("all_reduce", "dp"): 4 + 1})
    np.testing.assert_allclose([float(step(b)["loss"]) for b in case.batches], losses, rtol=1e-6)
    _assert_equal(model, expected)


def test_accumulation_with_batch_norm_takes_statistics_of_global_microbatches() -> None:
    """Microbatch j of n ranks is the union of their j-th parts; running statistics move once per microbatch."""
    case = CASES["convnet"]
    by_rank = np.array([[0, 1, 4, 5], [2, 3, 6, 7]]).ravel()  # so that microbatches are rows 0-3 and 4-7
    alone, reference = _step(case, 1, accumulate=2)
    step, model = _step(case, 2, accumulate=2)
    for batch in case.batches[:2]:
        loss = step(jax.tree.map(lambda x: x[by_rank], batch))["loss"]
        np.testing.assert_allclose(loss, alone(batch)["loss"], rtol=1e-6)
    _assert_equal(model, nnx.state(reference))


def test_one_all_reduce_per_bucket_and_one_for_all_results() -> None:
    """Forward: loss and metrics; backward: the buckets. Nothing else, also with clipping and adaptive optimizers."""

    def loss(model: Any, b: Any) -> Any:
        return _squares(model, b), {
            "mae": jnp.abs(model(b["x"]) - b["y"]).mean(),
            "x": jaxpar.Mean(b["x"].sum(), b["x"].size),
        }

    case = Case(_mlp, loss, [], optax.adamw(0.1), {"bucket_bytes": 100, "first_bucket_bytes": 1})
    step, _ = _step(case, 4, clip_norm=1.0)
    # Buckets: the last bias alone, 64 + 32 bytes, the first kernel; results: loss, mae, and the total of x.
    assert_collectives(
        step,
        {"x": _normal(8, 4), "y": _normal(8, 2)},
        expected={("all_reduce", "dp"): 3 + 1},
        bytes={"all_reduce": 4 * (2 + 16 + 8 + 32 + 3)},
    )


def test_one_compilation_per_batch_shape() -> None:
    case = CASES["mlp"]
    step, _ = _step(case, 2)
    with count_compilations() as compiled:
        step.lower(case.batches[0]).compile()  # to look at the program is not another compilation
        for rows in (8, 8, 4, 8, 4):
            step(jax.tree.map(lambda x, rows=rows: x[:rows], case.batches[0]))
    assert compiled.count_of("jit(train_step)") == 2


def test_float64_to_the_last_digits() -> None:
    with jax.enable_x64(True):
        batch = {
            "x": np.random.default_rng(0).normal(size=(8, 4)),
            "y": np.random.default_rng(1).normal(size=(8, 2)),
        }
        case = Case(_mlp, _squares, [batch] * 3, optax.adam(0.01), EACH, np.float64)
        losses, expected = _on_one_device(case, case.batches)
        step, model = _step(case, 4)
        np.testing.assert_allclose([float(step(b)["loss"]) for b in case.batches], losses, rtol=1e-12)
        _assert_equal(model, expected, rtol=1e-12)
        assert {x.dtype.name for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {"float64"}
    assert jnp.ones(()).dtype == jnp.float32


def test_dropout_does_not_depend_on_the_number_of_devices_nor_of_microbatches() -> None:
    def make() -> nnx.Module:
        rngs, init = nnx.Rngs(0), nnx.initializers.uniform(0.5)
        return nnx.Sequential(
            nnx.Linear(4, 8, rngs=rngs, kernel_init=init),
            nnx.Dropout(0.5, rngs=rngs),
            nnx.Linear(8, 2, rngs=rngs, kernel_init=init),
        )

    case = Case(
        make, _squares, [{"x": _normal(8, 4), "y": _normal(8, 2)}] * 3, optax.sgd(0.1), {}, fill=False
    )
    alone, reference = _step(case, 1)
    losses = [float(alone(b)["loss"]) for b in case.batches]
    assert len(set(losses)) == 3
    for num_ranks, accumulate in ((2, 1), (4, 1), (2, 2)):
        step, model = _step(case, num_ranks, accumulate=accumulate)
        np.testing.assert_allclose([float(step(b)["loss"]) for b in case.batches], losses, rtol=1e-6)
        _assert_equal(model, nnx.state(reference, nnx.Param))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, np.inf])
def test_clipping_equals_one_device(norm_type: float) -> None:
    """Row Q1: SGD with rate 1, so the parameters move by the clipped gradient."""
    batch = {"x": _normal(8, 4), "y": _normal(8, 2)}
    graphdef, params = nnx.split(_filled(_mlp))
    grads = jax.jit(jax.grad(lambda p: _squares(nnx.merge(graphdef, p, copy=True), batch)))(params)
    norm = np.linalg.norm(np.concatenate([np.ravel(g) for g in jax.tree.leaves(grads)]), norm_type)
    step, model = _step(
        Case(_mlp, _squares, [], optax.sgd(1.0), {}), 4, clip_norm=norm / 2, clip_norm_type=norm_type
    )
    np.testing.assert_allclose(step(batch)["grad_norm"], norm, rtol=1e-6)
    scale = (norm / 2) / (norm + 1e-6)
    _assert_equal(model, jax.tree.map(lambda p, g: np.asarray(p) - scale * np.asarray(g), params, grads))


class _TwoScalars(nnx.Module):
    def __init__(self) -> None:
        self.p, self.q = nnx.Param(jnp.array(1.0)), nnx.Param(jnp.array(1.0))


def _used_on_some_rows(model: Any, b: Any) -> jax.Array:
    return jnp.where(b > 0, 4 * model.q[...], 0).mean()


@pytest.mark.parametrize(("masked", "p"), [(False, 0.99), (True, 1.0)])
def test_unused_parameters_have_zero_gradients(masked: bool, p: float) -> None:
    """DDP-2: q is used by rank 0 only, its mean gradient is 2; p by none: only a mask keeps weight decay from it."""
    decay = optax.add_decayed_weights(0.1)
    if masked:
        decay = optax.masked(decay, lambda params: nnx.State({"p": False, "q": True}))
    model = DistributedDataParallel(_TwoScalars(), _mesh(2))
    optimizer = nnx.Optimizer(model, optax.chain(decay, optax.sgd(0.1)), wrt=nnx.Param)
    jaxpar.TrainStep(_used_on_some_rows, model, optimizer, mesh=_mesh(2))(np.array([1.0, 0.0], np.float32))
    assert float(model.q[...]) == pytest.approx(1 - 0.1 * (2 + 0.1), rel=1e-6)
    assert float(model.p[...]) == pytest.approx(p, rel=1e-6)


class _Scalar(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(()))


def test_ranks_with_different_numbers_of_batches_divide_by_the_active_ones() -> None:
    """DDP-4: rank 0 has 1, 1, 1 and rank 1 has 3, 3; w moves by 2, 2, 1 (divided by two ranks it would end at -4.5)."""

    def loss(model: Any, b: Any) -> Any:
        x, mask = b
        return jaxpar.Mean((model.w[...] * x * mask).sum(), mask.sum())

    model = DistributedDataParallel(_Scalar(), _mesh(2))
    step = jaxpar.TrainStep(loss, model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param), mesh=_mesh(2))
    seen = []
    for x, mask in (([1, 3], [1, 1]), ([1, 3], [1, 1]), ([1, 3], [1, 0]), ([1, 3], [0, 0])):
        step((np.array(x, np.float32), np.array(mask, np.float32)))
        seen.append(float(model.w[...]))
    assert seen == [-2.0, -4.0, -5.0, -5.0]
