"""A model for pipelines, as small as can be: tied embedding, a causal mask of the batch, a skip over all blocks, dropout.

Compiling is what takes time here. `Rig` compiles the stages of a step once and walks any schedule that lies on the same ranks.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.pp import Schedule, pipeline

VOCAB, WIDTH, HIDDEN, LENGTH = 16, 8, 24, 6
NUM_STEPS = 3


class Block(nnx.Module):
    """Mixes positions by a mask in place of attention: one matmul, and nothing about it depends on the width."""

    def __init__(self, dropout: float, dtype: Any, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, param_dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, param_dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, *, mask: jax.Array) -> jax.Array:
        mixed = mask @ x_BTD
        return x_BTD + self.dropout(self.down(jax.nn.silu(self.up(mixed))))


class Model(nnx.Module):
    def __init__(self, depth: int, *, dropout: float = 0.25, dtype: Any = jnp.float64) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, WIDTH, param_dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(dropout, dtype, rngs) for _ in range(depth)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        valid = (tokens > 0).astype(self.embed.embedding.dtype)
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), valid.dtype)) * valid[:, None, :] / LENGTH
        skip = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.embed.attend(x + skip)


def batch_of(rows: int, dtype: Any = np.float64) -> dict[str, np.ndarray]:
    """Weights differ from row to row, so microbatches count differently."""
    rng = np.random.default_rng(0)
    weights = (rng.uniform(size=(rows, LENGTH)) < np.linspace(0.2, 0.9, rows)[:, None]).astype(dtype)
    return {"tokens": rng.integers(0, VOCAB, (rows, LENGTH + 1)).astype(np.int32), "weights": weights}


def loss_fn(model: Any, batch: dict[str, Any]) -> tuple[jaxpar.Mean, dict[str, Any]]:
    """The weighted loss; a metric of the first stage (norm of the embeddings) and one of the batch alone."""
    tokens = batch["tokens"]
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    metrics = {"size": jnp.square(model.embed(tokens)).mean(), "weight": batch["weights"].mean()}
    return jaxpar.Mean((losses * batch["weights"]).sum(), batch["weights"].sum()), metrics


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What steps gave: their metrics by name, and all parameters after the last, in the model's order."""

    metrics: dict[str, list[float]]
    params: list[np.ndarray]

    def assert_equals(self, other: "Outcome", rtol: float) -> None:
        assert self.metrics.keys() == other.metrics.keys()
        for name, values in self.metrics.items():
            np.testing.assert_allclose(values, other.metrics[name], rtol=rtol, err_msg=name)
        for ours, theirs in zip(self.params, other.params, strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol)


class Rig:
    """A `TrainStep` that starts anew each time.

    Args:
        model: what is trained; given to `pipeline` or not.
        batch: of every step.
        loss: the loss function.
        options: of `TrainStep`.
    """

    def __init__(
        self,
        model: nnx.Module,
        mesh: Any,
        batch: Any,
        *,
        loss: Callable[..., Any] = loss_fn,
        tx: optax.GradientTransformation | None = None,
        **options: Any,
    ) -> None:
        model.train()
        self.batch = batch
        self.model: Any = model
        self.optimizer = nnx.Optimizer(model, tx or optax.adamw(1e-2), wrt=nnx.Param)
        self.start = [np.array(x) for x in self._numbers()]
        options = {"clip_norm": 0.1, "batch_axes": ()} | options
        self.step = jaxpar.TrainStep(loss, model, self.optimizer, mesh=mesh, **options)

    def run(self, schedule: Schedule | None = None, num_steps: int = NUM_STEPS) -> Outcome:
        """Steps from the beginning; by another schedule than the compiled one if it is given."""
        for variable, value in zip(self._variables(), self.start, strict=True):
            variable.set_value(jax.device_put(value, variable.get_value().sharding))
        if schedule is not None:
            engine: Any = self.step._engine
            assert schedule.rank_of_stage == engine._plan.schedule.rank_of_stage
            assert schedule.n_microbatches == engine._plan.schedule.n_microbatches
            engine._plan = dataclasses.replace(engine._plan, schedule=schedule)
        steps = [self.step(self.batch) for _ in range(num_steps)]
        metrics = {name: [float(step[name]) for step in steps] for name in steps[0]}
        return Outcome(metrics, [np.array(x) for x in jax.tree.leaves(nnx.state(self.model, nnx.Param))])

    def _variables(self) -> list[Any]:
        nodes = [v for owner in (self.model, self.optimizer) for _, v in nnx.iter_graph(owner)]
        variables = {id(v): v for v in nodes if isinstance(v, nnx.Variable)}
        return [v for v in variables.values() if not isinstance(v, nnx.RngKey)]

    def _numbers(self) -> list[Any]:
        return [v.get_value() for v in self._variables()]


def all_forwards_first(rank_of_stage: tuple[int, ...], n_microbatches: int) -> Schedule:
    """A lawful schedule on any ranks: to compile the stages of a rig, which then walks others."""
    rows = [[f"{s}F{m}" for m in range(n_microbatches) for s, r in enumerate(rank_of_stage) if r == rank] +
            [f"{s}B{m}" for m in range(n_microbatches) for s, r in reversed(list(enumerate(rank_of_stage))) if r == rank]
            for rank in range(max(rank_of_stage) + 1)]  # fmt: skip
    return Schedule(rows, rank_of_stage)


def pipelined(
    model: nnx.Module, schedule: Schedule, batch: Any, *, splits: Sequence[str] | None = None,
    remat: bool = False, executor: Any = "mpmd", **options: Any,
) -> Rig:  # fmt: skip
    """A rig with one device for each rank of a schedule."""
    devices = jax.devices()[: schedule.n_ranks]
    mesh = jaxpar.init_device_mesh((schedule.n_ranks,), ("pp",), devices=devices)
    spec: Any = None if splits is None else dict.fromkeys(splits, "beginning")
    pipeline(model, mesh["pp"], split_spec=spec, schedule=schedule, remat=remat, executor=executor)
    return Rig(model, mesh, batch, **options)


def on_one_device(model: nnx.Module, batch: Any, accumulate: int, **options: Any) -> Rig:
    """The same without a pipeline: one device that accumulates."""
    mesh = jaxpar.init_device_mesh((1,), ("dp",), devices=jax.devices()[:1])
    return Rig(model, mesh, batch, accumulate=accumulate, **options)
