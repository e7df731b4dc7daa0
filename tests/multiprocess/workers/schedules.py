"""Every named schedule on the same stages over processes: one clipped step of SGD each, against one device; prints what was run.

argv: how many microbatches, then how many stages a rank has (one number or more).
"""

import dataclasses
import functools
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "pp"))
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from pipeline_models import times_loss
from pipeline_rig import Model, all_forwards_first, batch_of, loss_fn

import jaxpar
from jaxpar._errors import ParallelizeError, ScheduleError
from jaxpar.fsdp import full_state
from jaxpar.mesh import get_world_size
from jaxpar.pp import Schedule, gathered, get_schedule, pipeline, schedule_names

ROWS, RATE, CLIP, RTOL = 8, 0.5, 0.1, 1e-12


def named(n_ranks: int, n_microbatches: int) -> dict[tuple[int, ...], dict[str, Schedule]]:
    """By the ranks of the stages, all named schedules that are defined and have a backward."""
    found: dict[tuple[int, ...], dict[str, Schedule]] = defaultdict(dict)
    for stages_per_rank in map(int, sys.argv[2:]):
        for name in schedule_names(stages_per_rank=stages_per_rank):
            try:
                schedule = get_schedule(name, n_ranks, n_microbatches, stages_per_rank=stages_per_rank)
            except ScheduleError:
                continue  # not defined for these numbers
            if not schedule.is_forward_only:
                found[schedule.rank_of_stage][name] = schedule
    return found


def expected(model: Any, batch: Any) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The metrics, and the parameters after a step by name, without stages."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params: Any) -> tuple[jax.Array, dict[str, Any]]:
        mean, metrics = loss_fn(nnx.merge(graphdef, params, rest), batch)
        return mean.total / mean.count, metrics

    (value, metrics), grads = loss(params)
    norm = float(optax.global_norm(grads))
    assert norm > CLIP
    rate = RATE * CLIP / (norm + 1e-6) * float(value)  # as in `clip_norm`; and `times_loss`
    after = jax.tree.map(lambda p, g: np.asarray(p - rate * g), params, grads)
    metrics = {"loss": value, "grad_norm": norm, **metrics}
    named = {".".join(map(str, path)): x.get_value() for path, x in nnx.to_flat_state(after)}
    return {name: float(x) for name, x in metrics.items()}, named


def assert_other_stages_are_not_read(model: Any) -> None:
    try:
        full_state(model)
    except ParallelizeError as error:
        assert "with jaxpar.pp.gathered(model, mesh): state = full_state(model)" in str(error)
    else:
        raise AssertionError("parameters of other stages were read")


def main() -> None:
    jaxpar.init_process_group(timeout_s=60)
    n_ranks, n_microbatches = get_world_size(), int(sys.argv[1])
    batch, mesh = batch_of(ROWS), jaxpar.init_device_mesh((n_ranks,), ("pp",))
    for rank_of_stage, schedules in named(n_ranks, n_microbatches).items():
        model = Model(len(rank_of_stage), dropout=0.0)
        start = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
        of_step, params = expected(model, batch)
        splits: Any = {f"blocks.{i}": "beginning" for i in range(1, len(rank_of_stage))}
        pipeline(
            model, mesh["pp"], split_spec=splits, schedule=all_forwards_first(rank_of_stage, n_microbatches)
        )
        optimizer = nnx.Optimizer(model, optax.chain(optax.sgd(RATE), times_loss()), wrt=nnx.Param)
        step = jaxpar.TrainStep(loss_fn, model, optimizer, mesh=mesh, batch_axes=(), clip_norm=CLIP)
        engine: Any = step._engine
        for name, schedule in schedules.items():
            engine._plan = dataclasses.replace(engine._plan, schedule=schedule)
            nnx.update(
                model,
                jax.tree.unflatten(
                    jax.tree.structure(nnx.state(model, nnx.Param)), [*map(jnp.asarray, start)]
                ),
            )
            metrics = step(batch)
            assert metrics.keys() == of_step.keys()
            for metric, value in of_step.items():
                np.testing.assert_allclose(
                    float(metrics[metric]), value, rtol=RTOL, err_msg=f"{name} {metric}"
                )
            assert_other_stages_are_not_read(model)
            with gathered(model, mesh):
                found = full_state(model)
            for path, theirs in params.items():
                np.testing.assert_allclose(
                    found[path], theirs, rtol=RTOL, atol=RTOL, err_msg=f"{name} {path}"
                )
            print("equal:", name, rank_of_stage, flush=True)


if __name__ == "__main__":
    with jax.enable_x64(True):
        main()
