"""Averages of parameters and updates that are left out, in every layout (issue: as optax transformations)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import ParallelizeError
from jaxpar.fsdp import full_state, fully_shard, shard_optimizer_state
from jaxpar.mesh import DeviceMesh, init_device_mesh
from jaxpar.pp import pipeline
from jaxpar.tp import ColwiseParallel, RowwiseParallel, parallelize_module
from jaxpar.train import LocalSGDStep, averaged, ema, skip_spikes


def numbers(key: Any, shape: tuple[int, ...], dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


class MLP(nnx.Module):
    """Two layers; initializers would take longer to compile than the step."""

    def __init__(self, dtype: Any = np.float32) -> None:
        options: Any = {
            "rngs": nnx.Rngs(0),
            "kernel_init": numbers,
            "bias_init": numbers,
            "param_dtype": dtype,
        }
        self.up, self.down = nnx.Linear(4, 8, **options), nnx.Linear(8, 2, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


def squares(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def batch_of(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(8, 4)).astype(np.float32),
        "y": rng.normal(size=(8, 2)).astype(np.float32),
    }


def mesh_of(**sizes: int) -> DeviceMesh:
    num = int(np.prod([*sizes.values()]))
    return init_device_mesh(tuple(sizes.values()), tuple(sizes), devices=jax.devices()[:num])


def whole(model: nnx.Module, mesh: DeviceMesh) -> None:
    pass


def fsdp_tp(model: nnx.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh["other"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh["dp"])


def piped(model: nnx.Module, mesh: DeviceMesh) -> None:
    pipeline(model, mesh["other"], n_microbatches=2, split_spec={"down": "beginning"})


def trained(
    layout: Callable[..., None], tx: Any, *, is_zero1: bool = False, dtype: Any = np.float32
) -> tuple[Any, nnx.Optimizer, jaxpar.TrainStep]:
    model, mesh = MLP(dtype), mesh_of(dp=2, other=1 if layout is whole else 2)
    layout(model, mesh)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    if is_zero1:
        shard_optimizer_state(optimizer, mesh["dp"])
    return model, optimizer, jaxpar.TrainStep(squares, model, optimizer, mesh=mesh, batch_axes="dp")


@pytest.mark.parametrize(
    ("layout", "is_zero1", "decay", "debias"),
    [
        (whole, True, 0.5, False),
        (fsdp_tp, False, lambda n: n / (n + 1), True),
        (piped, False, 0.5, True),
    ],
)
def test_the_average_is_that_of_the_parameters_after_each_step(
    layout: Any, is_zero1: bool, decay: Any, debias: bool
) -> None:
    model, optimizer, step = trained(
        layout, optax.chain(optax.adam(0.1), ema(decay, debias=debias)), is_zero1=is_zero1
    )
    history = [full_state(model)]
    for i in range(3):
        step(batch_of(i))
        history.append(full_state(model))
    shares = [0.125, 0.125, 0.25, 0.5] if not debias else [0, 1 / 7, 2 / 7, 4 / 7]
    if callable(decay):
        shares = [0, 1 / 3, 1 / 3, 1 / 3]
    with averaged(model, optimizer):
        inside, loss = full_state(model), step.evaluate(batch_of(9))["loss"]
    for name, got in inside.items():
        want = sum(share * state[name] for share, state in zip(shares, history, strict=True))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(full_state(model)[name], history[-1][name])
    np.testing.assert_allclose(loss, in_numpy(inside, batch_of(9)), rtol=1e-5)
    assert float(step.evaluate(batch_of(9))["loss"]) != pytest.approx(float(loss), rel=1e-4)


def in_numpy(state: Any, batch: Any) -> float:
    hidden = np.tanh(batch["x"] @ state["up.kernel"] + state["up.bias"])
    return ((hidden @ state["down.kernel"] + state["down.bias"] - batch["y"]) ** 2).mean()


def test_the_average_lies_as_its_parameter_and_is_kept_in_fp32() -> None:
    model, optimizer, _ = trained(fsdp_tp, optax.chain(optax.sgd(0.1), ema(0.9)), dtype=jnp.bfloat16)
    average: Any = optimizer.opt_state[-1].average["up"]["kernel"].get_value()
    assert average.dtype == jnp.float32
    assert average.sharding == model.up.kernel.get_value().sharding
    with averaged(model, optimizer) as same:
        assert same is model and model.up.kernel.get_value().dtype == jnp.bfloat16


def test_the_averages_of_local_sgd_can_be_averaged() -> None:
    model, mesh = MLP(), mesh_of(dp=2)
    optimizer = nnx.Optimizer(model, optax.chain(optax.sgd(0.1), ema(0.5)), wrt=nnx.Param)
    outer = optax.chain(optax.sgd(1.0), ema(0.5))
    step = LocalSGDStep(squares, model, optimizer, mesh=mesh, period=1, outer=outer)
    history = []
    for i in range(2):
        step(batch_of(i))
        history.append(np.asarray(model.up.kernel[...]))
    assert step.state.outer is not None
    with averaged(model, step.state.outer):
        np.testing.assert_allclose(
            model.up.kernel[...], (history[0] + 2 * history[1]) / 3, rtol=1e-5, atol=1e-6
        )
    with pytest.raises(
        ParallelizeError, match=r"average of down.bias, float32\[2, 2\], and the model has float32\[2\]"
    ):
        averaged(model, optimizer).__enter__()


def test_masked_parameters_stay_and_others_are_averaged() -> None:
    model = MLP()
    mask = lambda params: jax.tree.map_with_path(lambda path, _: "up" in str(path), params)  # noqa: E731
    optimizer = nnx.Optimizer(model, optax.masked(ema(0.0), mask), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    before = model.down.kernel[...]
    with averaged(model, optimizer):
        np.testing.assert_array_equal(model.down.kernel[...], before)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.sgd(0.1), "keeps no average of the parameters"),
        (optax.chain(ema(0.9), ema(0.99)), "keeps two averages of down.bias"),
    ],
)
def test_one_average_is_needed(tx: Any, message: str) -> None:
    model = MLP()
    with pytest.raises(ParallelizeError, match=message):
        averaged(model, nnx.Optimizer(model, tx, wrt=nnx.Param)).__enter__()


def test_what_cannot_be_averaged_is_an_error() -> None:
    with pytest.raises(ParallelizeError, match=r"decay=1.0 is the weight of the average before"):
        ema(1.0)
    with pytest.raises(ParallelizeError, match="averages parameters"):
        ema(0.5).update(jnp.ones(()), ema(0.5).init(jnp.ones(())))


def test_spikes_are_left_out_and_norms_that_stay_are_accepted_in_the_end() -> None:
    tx = skip_spikes(optax.sgd(1.0, momentum=0.5), factor=3.0, decay=0.75, warmup_steps=3)
    state, update, updates = tx.init(jnp.zeros(2)), jax.jit(tx.update), np.zeros(2)
    norms = [1.0, 9.0, np.inf, 1.0, 40.0, np.nan, 2.0, *[60.0] * 12]
    usual, velocity, skipped = 0.0, np.zeros(2), 0
    for i, norm in enumerate(norms):
        grads = np.array([0.6, -0.8]) * norm
        updates, state = update(grads, state)
        is_taken = np.isfinite(norm) and (i < 3 or norm <= 3 * usual)
        skipped += not is_taken
        entered = norm if is_taken else 3 * usual if np.isfinite(norm) else usual
        usual += max(0.25, 1 / (i + 1)) * (entered - usual)
        velocity = 0.5 * velocity + grads if is_taken else velocity
        np.testing.assert_allclose(updates, -velocity if is_taken else np.zeros(2), rtol=1e-5, err_msg=str(i))
        np.testing.assert_allclose(state.usual_size, usual, rtol=1e-5)
        assert int(state.num_skipped) == skipped
    assert 3 < skipped < len(norms) - 6 and np.abs(updates).max() > 40


def test_a_spike_of_sharded_gradients_changes_no_parameter_and_no_state() -> None:
    tx = optax.chain(skip_spikes(optax.adam(0.1), warmup_steps=1))
    model, optimizer, step = trained(fsdp_tp, tx)
    step(batch_of(0))
    before = full_state(model), full_state(optimizer)
    step({"x": batch_of(1)["x"], "y": 1e3 * batch_of(1)["y"]})
    after = full_state(model), full_state(optimizer)
    assert all(np.array_equal(before[0][name], x) for name, x in after[0].items())
    changed = {name.split(".")[-1] for name, x in after[1].items() if not np.array_equal(before[1][name], x)}
    assert changed == {"step", "num_updates", "num_skipped", "usual_size", "last_size"}
    assert int(optax.tree_utils.tree_get(optimizer.opt_state, "num_skipped")[...]) == 1
    step(batch_of(2))
    assert not any(np.array_equal(before[0][name], x) for name, x in full_state(model).items())


@pytest.mark.parametrize("layout", [whole, fsdp_tp, piped])
def test_an_optimizer_may_look_at_the_loss(layout: Any) -> None:
    """Both a spike that is left out and a plateau that lowers the rate, with the numbers of a training by hand."""
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.2)
    tx = optax.chain(skip_spikes(optax.sgd(0.1), of="loss", factor=8.0, warmup_steps=1), plateau)
    model, optimizer, step = trained(layout, tx)
    expected = MLP()
    by_hand, losses = nnx.Optimizer(expected, tx, wrt=nnx.Param), []
    for i in range(5):
        batch = batch_of(0) | ({"y": 50 * batch_of(1)["y"]} if i == 2 else {})
        loss, grads = nnx.value_and_grad(squares)(expected, batch)
        by_hand.update(expected, grads, value=loss)
        losses.append(float(loss))
        np.testing.assert_allclose(step(batch)["loss"], loss, rtol=1e-5)
    for name, want in full_state(expected).items():
        np.testing.assert_allclose(full_state(model)[name], want, rtol=1e-5, atol=1e-6, err_msg=name)
    for name in ("usual_size", "last_size", "num_skipped", "scale"):
        found, want = (optax.tree_utils.tree_get(o.opt_state, name)[...] for o in (optimizer, by_hand))
        np.testing.assert_allclose(found, want, rtol=1e-5, err_msg=name)
    assert losses[2] > 100 and int(optax.tree_utils.tree_get(by_hand.opt_state, "num_skipped")[...]) == 1
    assert float(optax.tree_utils.tree_get(by_hand.opt_state, "scale")[...]) < 1


def test_local_steps_look_at_the_loss_of_all() -> None:
    model, mesh = MLP(), mesh_of(dp=2)
    optimizer = nnx.Optimizer(model, skip_spikes(optax.sgd(0.1), of="loss", warmup_steps=1), wrt=nnx.Param)
    step = LocalSGDStep(squares, model, optimizer, mesh=mesh, period=1)
    loss = step(batch_of(0))["loss"]
    before = full_state(model)
    step(batch_of(0) | {"y": 1e3 * batch_of(0)["y"]})
    assert all(np.array_equal(before[name], x) for name, x in full_state(model).items())
    step(batch_of(0))
    assert float(step(batch_of(0))["loss"]) < float(loss)


def test_without_a_loss_there_is_nothing_to_watch() -> None:
    tx = skip_spikes(optax.sgd(0.1), of="loss")
    with pytest.raises(ParallelizeError, match=r"Write tx.update\(grads, state, params, value=loss\)"):
        tx.update(jnp.ones(()), tx.init(jnp.ones(())))
    with pytest.raises(ParallelizeError, match="of='losses' is none of"):
        skip_spikes(optax.sgd(0.1), of="losses")  # pyright: ignore[reportArgumentType]


def test_a_pipeline_refuses_what_depends_on_the_gradients_of_all_stages() -> None:
    _, _, step = trained(piped, skip_spikes(optax.sgd(0.1)))
    with pytest.raises(ParallelizeError, match="depends on parameters or gradients of stages"):
        step(batch_of(0))


@pytest.mark.parametrize("options", [{"factor": 1.0}, {"decay": 1.0}, {"warmup_steps": 0}])
def test_limits_that_mean_nothing_are_errors(options: Any) -> None:
    with pytest.raises(ParallelizeError, match="must be above 1"):
        skip_spikes(optax.sgd(0.1), **options)
