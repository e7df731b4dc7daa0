"""A pipelined `TrainStep` equals one device: loss, norm, metrics and parameters, in float64 at 1e-12.

Whole steps, on samples of what test_contract.py enumerates: every schedule, number of ranks, of stages and of microbatches.
A rig compiles its stages once and then walks every schedule that lies on the same ranks, from the same start. References: the
same step on one device that accumulates (with dropout, whose masks depend on rows and not on microbatches), and plain optax.
"""

import functools
import random
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar._errors import BatchError, ScheduleError
from jaxpar.pp import Schedule, _walk, get_schedule, schedule_names

sys.path.insert(0, str(Path(__file__).parent))
from pipeline_rig import (
    HIDDEN,
    Model,
    Outcome,
    Rig,
    all_forwards_first,
    batch_of,
    loss_fn,
    on_one_device,
    pipelined,
)
from random_schedules import random_plan

RTOL = 1e-12
ROWS = 12


pytestmark = pytest.mark.usefixtures("float64_values_only")


@functools.cache
def accumulated() -> Outcome:
    """One device, four microbatches; dropout draws by row, so it is the reference of any number of microbatches."""
    return on_one_device(Model(4), batch_of(ROWS), accumulate=4).run()


@functools.cache
def rig(rank_of_stage: tuple[int, ...], n_microbatches: int, *, remat: bool = False) -> Rig:
    schedule = all_forwards_first(rank_of_stage, n_microbatches)
    return pipelined(Model(4), schedule, batch_of(ROWS), remat=remat)


def schedules(n_ranks: int, n_microbatches: int, stages_per_rank: int) -> dict[str, Schedule]:
    """All named schedules that train and are defined for these numbers."""
    found = {}
    for name in schedule_names(stages_per_rank=stages_per_rank):
        try:
            schedule = get_schedule(name, n_ranks, n_microbatches, stages_per_rank=stages_per_rank)
        except ScheduleError as error:
            assert error.law == "definition" and "is defined only if" in str(error)
            continue
        if not schedule.is_forward_only:
            found[name] = schedule
    return found


# Every schedule


@pytest.mark.parametrize("name", schedules(2, 4, 1))
def test_one_stage_per_rank(name: str) -> None:
    """PP23: over three steps; every backward sees the weights of the step's start."""
    rig((0, 1), 4).run(schedules(2, 4, 1)[name]).assert_equals(accumulated(), RTOL)


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_stages_go_there_and_back(name: str) -> None:
    """The first and the last stage share a rank, and with it the tied weight."""
    schedule = schedules(2, 4, 2)[name]
    rig(schedule.rank_of_stage, 4).run(schedule).assert_equals(accumulated(), RTOL)


def test_one_stage_alone() -> None:
    for schedule in schedules(1, 3, 1).values():
        rig((0,), 3).run(schedule).assert_equals(accumulated(), RTOL)


def test_a_random_lawful_schedule_on_ranks_in_no_order() -> None:
    """Neither a loop nor a V; F, B, I and W of a stage in an order that nobody would choose."""
    plans = (random_plan(random.Random(seed)) for seed in range(1000))
    plan = next(
        plan
        for plan in plans
        if len(plan.rank_of_stage) == 4
        and max(plan.rank_of_stage) == 2
        and plan.rank_of_stage[0] == 1
        and ROWS % Schedule(plan.text(), plan.rank_of_stage).n_microbatches == 0
    )
    schedule = Schedule(plan.text(), plan.rank_of_stage)
    assert {"I", "B"} <= {token[1] for row in plan.rows for token in row if token}
    rig(schedule.rank_of_stage, schedule.n_microbatches).run(schedule).assert_equals(accumulated(), RTOL)


def test_remat() -> None:
    remat = rig((0, 1), 4, remat=True)
    for name in ("1F1B", "ZBH1"):
        remat.run(schedules(2, 4, 1)[name]).assert_equals(accumulated(), RTOL)


# Other references


@functools.cache
def plain() -> Outcome:
    """Plain Flax and optax, the whole batch at once; no dropout."""
    model, batch = Model(4, dropout=0.0), batch_of(60)
    optimizer = nnx.Optimizer(model, _clipped_adamw(), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        def objective(model: Any) -> Any:
            mean, metrics = loss_fn(model, batch)
            return mean.total / mean.count, metrics

        (loss, metrics), grads = nnx.value_and_grad(objective, has_aux=True)(model)
        optimizer.update(model, grads)
        return {"loss": loss, "grad_norm": optax.tree.norm(grads), **metrics}

    steps = [step(model, optimizer) for _ in range(2)]
    metrics = {name: [float(s[name]) for s in steps] for name in steps[0]}
    return Outcome(metrics, [np.array(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))])


def _clipped_adamw() -> optax.GradientTransformation:
    """`clip_norm=0.1` as TrainStep and PyTorch clip: by max_norm / (norm + 1e-6)."""

    def clip(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = jnp.minimum(1.0, 0.1 / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * factor, updates), state

    return optax.chain(optax.GradientTransformation(lambda params: (), clip), optax.adamw(1e-2))


def test_four_ranks_and_five_microbatches_equal_plain_flax() -> None:
    """The whole batch at once, without anything of this library."""
    found = schedules(4, 5, 1)
    assert {"GPipe", "1F1B"} <= found.keys()
    four = pipelined(Model(4, dropout=0.0), found["1F1B"], batch_of(60))
    for schedule in found.values():
        four.run(schedule, num_steps=2).assert_equals(plain(), RTOL)


def test_float32() -> None:
    batch = batch_of(ROWS, np.float32)
    expected = on_one_device(Model(2, dropout=0.0, dtype=jnp.float32), batch, accumulate=4).run()
    two = pipelined(Model(2, dropout=0.0, dtype=jnp.float32), get_schedule("1F1B", 2, 4), batch)
    for name in ("1F1B", "ZBH1"):
        two.run(get_schedule(name, 2, 4)).assert_equals(expected, 1e-5)


# Variables


class Normed(nnx.Module):
    """Linear, batch norm, linear: a stage each. The counter is read by the first and the last of them."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(4, 6, param_dtype=jnp.float64, rngs=rngs)
        self.norm = nnx.BatchNorm(6, param_dtype=jnp.float64, rngs=rngs)
        self.norm.mean.set_value(
            jnp.zeros(6, jnp.float64)
        )  # Flax makes both in float32, whatever param_dtype
        self.norm.var.set_value(jnp.ones(6, jnp.float64))
        self.down = nnx.Linear(6, 1, param_dtype=jnp.float64, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.float64(1.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls.set_value(self.calls.get_value() * 1.5)
        x = self.norm(self.up(x) / self.calls.get_value())
        return self.down(jax.nn.silu(x)) * self.calls.get_value()


def squares(model: Any, batch: dict[str, Any]) -> jax.Array:
    """A scalar: the mean over equal microbatches."""
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def test_variables_go_from_microbatch_to_microbatch_within_their_stages() -> None:
    """PP4, W4: nothing but the step's own forwards changes them, no pass that finds out shapes: so they are right after step 1."""
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 4)), "y": rng.normal(size=(8, 1))}
    # A bias before a batch norm has no gradient but rounding, which AdamW would blow up.
    options: dict[str, Any] = {"loss": squares, "tx": optax.sgd(0.1, momentum=0.9)}
    one = on_one_device(Normed(), batch, accumulate=4, **options)
    three = pipelined(Normed(), get_schedule("1F1B", 3, 4), batch, splits=["norm", "down"], **options)
    plain = Normed()
    plain.train()
    for rows in np.split(batch["x"], 4):
        plain(jnp.asarray(rows))
    three.run(num_steps=1)
    for ours, theirs in zip(
        *(jax.tree.leaves(nnx.state(m, nnx.BatchStat)) for m in (three.model, plain)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=RTOL)
    three.run().assert_equals(one.run(), RTOL)
    for ours, theirs in zip(
        *(jax.tree.leaves(nnx.state(r.model, nnx.BatchStat)) for r in (three, one)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=RTOL)
    assert float(three.model.calls.get_value()) == 1.5 ** (4 * 3)


# Cases from public bug reports


class Times(nnx.Module):
    """A layer that multiplies; by a parameter or by a constant."""

    def __init__(self, factor: Any, *, is_trained: bool = True) -> None:
        self.factor = nnx.Param(jnp.float64(factor)) if is_trained else factor

    def __call__(self, x: jax.Array, *, mask: Any = 1.0) -> jax.Array:
        return x * self.factor * mask


class Chain(nnx.Module):
    def __init__(self, *layers: nnx.Module) -> None:
        self.layers = nnx.List(layers)

    def __call__(self, x: jax.Array, **last: Any) -> jax.Array:
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](x, **last)


def test_a_padded_batch_is_exact() -> None:
    samples = {"x": np.arange(1.0, 9.0)}
    first = Times(1.0)
    model = Chain(first, Times(1.0, is_trained=False))
    two = pipelined(
        model, get_schedule("1F1B", 2, 3), samples, tx=optax.sgd(1.0), clip_norm=None,
        loss=lambda m, b: jaxpar.Mean((m(b["x"]) * b["mask"]).sum(), b["mask"].sum()),
    )  # fmt: skip
    padded, mask = jaxpar.data.pad_batch(samples, 9)
    metrics = two.step(padded | {"mask": mask.astype(np.float64)})
    assert float(metrics["loss"]) == 4.5
    assert float(first.factor.get_value()) == 1.0 - 4.5


@pytest.mark.parametrize(
    "mask", [2.0, None, (2.0, 3.0), np.full((4, 4), 2.0)], ids=["float", "none", "tuple", "(S, S)"]
)
def test_what_is_not_in_the_batch_reaches_its_stage_whole(mask: Any) -> None:
    """PP5; case PP-3, torchtitan#1723. Every array of the batch is split into microbatches; anything else is not, whatever its shape."""

    class Masked(Times):
        def __call__(self, x: jax.Array, *, rows: jax.Array, mask: Any) -> jax.Array:  # type: ignore[override]
            factor = sum(mask) if isinstance(mask, tuple) else 2.0 if mask is None else np.mean(mask)
            return super().__call__(x) * factor * rows

    def loss(model: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        out = model(batch["x"], rows=batch["m"], mask=mask)
        return out.mean(), {
            "rows": jaxpar.Mean((out[:, None] * batch["place"]).sum(0), batch["place"].sum(0))
        }

    batch = {"x": np.ones(4), "m": np.arange(1.0, 5.0), "place": np.eye(4)}
    model = Chain(Times(1.0), Masked(1.0))
    metrics = pipelined(model, get_schedule("GPipe", 2, 4), batch, loss=loss).step(batch)
    factor = 5.0 if isinstance(mask, tuple) else 2.0
    np.testing.assert_array_equal(metrics["rows"], factor * batch["m"])
    assert float(metrics["loss"]) == 2.5 * factor


class Tied(nnx.Module):
    """E[0] in the first stage, E * h in the last."""

    def __init__(self, num_between: int) -> None:
        self.table = nnx.Param(jnp.array([1.0, 2.0]))
        self.layers = nnx.List([Times(1.0, is_trained=False) for _ in range(num_between + 2)])

    def __call__(self, ids: jax.Array) -> jax.Array:
        h = self.table[ids]
        for layer in self.layers:
            h = layer(h)
        return self.table[...] * h[:, None]


@pytest.mark.parametrize(
    ("schedule", "n_ranks", "v"), [("1F1B", 2, 1), ("ZBH1", 3, 1), ("Interleaved1F1B", 2, 2)]
)
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_gradients_of_a_tied_weight_are_summed_and_counted_once(
    schedule: str, n_ranks: int, v: int, clip_norm: float | None
) -> None:
    """Case PP-4, piper#13, Megatron-LM#299: dE = [E1, h] = [2, 1] from two stages; wrong are [0.8, 2] and [1, 1.9]."""
    batch, num_stages = {"ids": np.zeros(6, np.int32)}, n_ranks * v
    model = Tied(num_stages - 2)
    tied = pipelined(
        model, get_schedule(schedule, n_ranks, 6, stages_per_rank=v), batch, tx=optax.sgd(0.1), clip_norm=clip_norm,
        loss=lambda m, b: m(b["ids"])[:, 1].mean(),
    )  # fmt: skip
    expected = np.array([1.0, 2.0])
    for _ in range(3):
        metrics = tied.step(batch)
        gradient = expected[::-1]  # d(E0 * E1)
        norm = float(np.linalg.norm(gradient))
        expected = expected - 0.1 * gradient * (
            1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
        )
        np.testing.assert_allclose(model.table.get_value(), expected, rtol=1e-14)
        if clip_norm is not None:
            np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=1e-14)
    if clip_norm is None:
        np.testing.assert_allclose(
            expected, [0.428, 1.759], rtol=1e-14
        )  # by way of [0.8, 1.9] and [0.61, 1.82]


def test_two_sequence_lengths_in_one_run_equal_dense() -> None:
    """W3, pytorch#159942: shapes are free to change between steps. Each is compiled once; what is learned at one counts at the other."""
    layers = [Times(2.0), Times(3.0)]
    two = pipelined(
        Chain(*layers), get_schedule("1F1B", 2, 2), None, tx=optax.sgd(0.1), clip_norm=None,
        loss=lambda m, b: m(b["x"]).mean(),
    )  # fmt: skip
    first, second = 2.0, 3.0
    for rows, length in ((4, 3), (4, 5), (4, 3), (4, 5)):
        x = np.arange(float(rows * length)).reshape(rows, length) / 16
        loss = float(two.step({"x": x})["loss"])
        assert loss == pytest.approx(first * second * x.mean(), rel=1e-14)
        first, second = first - 0.1 * second * x.mean(), second - 0.1 * first * x.mean()
    found = [float(layer.factor.get_value()) for layer in layers]
    assert found == pytest.approx([first, second], rel=1e-14)
    engine: Any = two.step._engine
    assert len(engine._compiled) == 2


def test_a_batch_may_be_any_pytree_of_arrays() -> None:
    """PP5: rows of every array, whatever the structure; what has no rows is no part of a batch, and is refused."""
    batch = {"x": (np.arange(4.0), [np.ones((4, 2))]), "on": np.array([True, False, True, True])}
    model = Chain(Times(2.0), Times(3.0))

    def loss(m: Any, b: Any) -> jaxpar.Mean:
        x, (ones,) = b["x"]
        return jaxpar.Mean((m(x) * ones.sum(-1) * b["on"]).sum(), b["on"].sum())

    two = pipelined(model, get_schedule("1F1B", 2, 2), batch, loss=loss)
    assert float(two.step(batch)["loss"]) == 12.0 * (0 + 2 + 3) / 3
    with pytest.raises(BatchError, match=r"scale is a scalar \(float.*functools.partial"):
        two.step(batch | {"scale": 2.0})


# What is alive


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZBH1", "ZBH2"])
def test_no_more_activations_are_alive_than_the_schedule_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays that F keeps (the hidden layer of a block) are counted on each rank's device after every action."""
    schedule = schedules(2, 4, 1)[name]
    two = rig((0, 1), 4)
    two.run(num_steps=1)
    engine: Any = two.step._engine
    codes = next(iter(engine._compiled.values())).stages
    per_activation = [sum(t.shape[-1] == HIDDEN and t.ndim == 3 for t in stage.code.kept) for stage in codes]
    assert min(per_activation) > 0
    peaks, do = [0.0, 0.0], _walk._Run.do

    def counted(run: Any, action: Any) -> None:
        do(run, action)
        for rank in range(2):
            device = jax.devices()[rank]
            alive = sum(
                x.shape[-1:] == (HIDDEN,) and x.ndim == 4 and x.devices() == {device}
                for x in jax.live_arrays()
            )
            peaks[rank] = max(peaks[rank], alive / per_activation[rank])

    monkeypatch.setattr(_walk._Run, "do", counted)
    two.run(schedule, num_steps=1)
    assert all(peak <= limit for peak, limit in zip(peaks, schedule.peak_live(), strict=True))
    if name in ("GPipe", "1F1B"):
        assert tuple(peaks) == schedule.peak_live()
