"""The contract of schedules: each one that is lawful computes what one device does, loss and every gradient, in float64 at 1e-12.

    every named schedule x ranks 1, 2, 4 x stages per rank 1, 2 x microbatches (fewer than ranks, as many, three times as many)
        x microbatches equal, or the first two with one row more; and random lawful schedules, on ranks in any order

What a stage computes does not depend on the schedule. So its programs are compiled once for each number of stages, on a device of
its own, and every schedule is walked over the same programs: real moves between devices, the real books of what waits for what.
Whole steps, with placement, optimizer and metrics: test_pipeline.py; one program for a schedule: test_spmd.py; processes:
tests/multiprocess/test_pipeline.py (sampled) and test_pipeline_schedules.py (every named one).
"""

import dataclasses
import functools
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar._errors import ScheduleError
from jaxpar.pp import Schedule, get_schedule, schedule_names
from jaxpar.pp._ranks import Ranks
from jaxpar.pp._stage import Stage
from jaxpar.pp._walk import Smaller, StageArrays, run_schedule

sys.path.insert(0, str(Path(__file__).parent))
from pipeline_rig import Model, all_forwards_first, batch_of, loss_fn, pipelined
from random_schedules import random_plan

RTOL = 1e-12
# 24 rows in 22 parts: the programs of the larger ones take two rows each, those of the smaller ones one.
ROWS, MOST_PARTS, NUM_LARGER = 24, 22, 2


pytestmark = pytest.mark.usefixtures("float64_values_only")


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """The programs of a model's stages, for microbatches of two rows and of one, and what they work on.

    Args:
        larger: of each stage, for two rows.
        smaller: for one row, if two microbatches of two rows come before.
        ranks: a rank for each stage.
        params: of the model.
        batch: its arrays.
    """

    larger: tuple[Stage, ...]
    smaller: tuple[Stage, ...]
    ranks: Ranks
    params: list[Any]
    batch: list[Any]

    @classmethod
    def of(cls, n_stages: int) -> "Stages":
        batch = batch_of(ROWS)
        rig = pipelined(
            Model(n_stages, dropout=0.0), all_forwards_first(tuple(range(n_stages)), MOST_PARTS), batch
        )
        engine: Any = rig.step._engine
        leaves, treedef = jax.tree.flatten(batch)
        shapes = engine._batch.shapes(leaves)
        larger, smaller = (
            engine._stages(engine._traces, shapes, treedef, is_smaller=is_smaller)[1]
            for is_smaller in (False, True)
        )
        return cls(larger, smaller, engine._ranks, engine._model.values()[0], leaves)

    def run(self, schedule: Schedule, *, is_equal: bool) -> tuple[float, list[np.ndarray]]:
        """The sums over its microbatches of the loss's total and of every gradient."""
        arrays = [self._arrays(stage) for stage in self.larger]
        run_schedule(
            schedule,
            self.larger,
            arrays,
            [frozenset()] * len(self.larger),
            dataclasses.replace(self.ranks, of_stage=schedule.rank_of_stage),
            smaller=None if is_equal else Smaller(self.smaller, NUM_LARGER),
        )
        grads = [np.zeros(x.shape) for x in self.params]
        for stage, a in zip(self.larger, arrays, strict=True):
            for i, gradient in zip(stage.code.params, a.grads, strict=True):
                grads[i] += np.asarray(gradient[0])
        total = next(a.sums[0] for stage, a in zip(self.larger, arrays, strict=True) if 0 in stage.sums)
        return float(total[0]), grads

    def _arrays(self, stage: Stage) -> StageArrays:
        def zeros(types: list[Any]) -> list[Any]:
            return [jax.device_put(np.zeros((1, *t.shape)), stage.between(t).sharding) for t in types]

        def here(x: Any) -> Any:
            return jax.device_put(x, stage.mesh.devices.flat[0])

        return StageArrays(
            params=[here(self.params[i]) for i in stage.code.params],
            fixed=[],
            changed=[],
            batch=[here(self.batch[i]) for i in stage.arrays],
            sums=zeros(stage.sum_types),
            grads=zeros(stage.grad_types),
        )


@functools.cache
def stages(number: int) -> Stages:
    return Stages.of(number)


@functools.cache
def by_rows(n_stages: int) -> Any:
    """A function of a number of rows: the loss's total over the first ones and its gradients, on one device without stages."""
    graphdef, params, rest = nnx.split(Model(n_stages, dropout=0.0), nnx.Param, ...)
    batch = batch_of(ROWS)

    @jax.jit
    @jax.value_and_grad
    def total(params: Any, weights: Any) -> jax.Array:
        mean, _ = loss_fn(nnx.merge(graphdef, params, rest), batch | {"weights": weights})
        return mean.total

    @functools.cache
    def run(num_rows: int) -> tuple[float, list[np.ndarray]]:
        weights = batch["weights"] * (np.arange(ROWS) < num_rows)[:, None]
        value, grads = total(params, jnp.asarray(weights))
        return float(value), [np.asarray(x) for x in jax.tree.leaves(grads)]

    return run


def check(schedule: Schedule) -> None:
    """Equal microbatches; and unequal ones, if there are more than the larger ones."""
    n_stages, parts = schedule.n_stages, schedule.n_microbatches
    cases = [(True, 2 * parts)] + [(False, parts + NUM_LARGER)] * (parts > NUM_LARGER)
    for is_equal, num_rows in cases:
        total, grads = stages(n_stages).run(schedule, is_equal=is_equal)
        expected, expected_grads = by_rows(n_stages)(num_rows)
        assert total == pytest.approx(expected, rel=RTOL)
        for ours, theirs in zip(grads, expected_grads, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=RTOL, atol=RTOL)


def defined(n_ranks: int, stages_per_rank: int) -> dict[str, list[Schedule]]:
    """By name, for all numbers of microbatches of the contract for which it is defined; forward-only ones left out."""
    found: dict[str, list[Schedule]] = {}
    numbers = sorted({1, 2, 3, 4, 5, n_ranks, 3 * n_ranks})
    for name, number in itertools.product(schedule_names(stages_per_rank=stages_per_rank), numbers):
        try:
            schedule = get_schedule(name, n_ranks, number, stages_per_rank=stages_per_rank)
        except ScheduleError as error:
            assert error.law == "definition" and "is defined only if" in str(error)
            continue
        if not schedule.is_forward_only:
            found.setdefault(name, []).append(schedule)
    return found


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_every_named_schedule_equals_one_device(n_ranks: int, stages_per_rank: int) -> None:
    """PP6; case PP-1, torchtitan#775: fewer microbatches than stages hang, or are forbidden where they would work.

    Each number of microbatches is run twice: equal ones, and (from three on) two that have one row more than the others, as those
    of a batch that does not divide. Every schedule is defined for some number here.
    """
    found = defined(n_ranks, stages_per_rank)
    assert found.keys() == set(schedule_names(stages_per_rank=stages_per_rank)) - {"ForwardOnly"}
    for schedule in itertools.chain.from_iterable(found.values()):
        check(schedule)


def test_random_lawful_schedules_equal_one_device() -> None:
    """W5: what the validator lets pass runs, and is right: on ranks in any order, F, B, I and W of a stage as they come."""
    plans = (random_plan(random.Random(seed)) for seed in range(200))
    lawful = [plan for plan in plans if len(plan.rank_of_stage) in (1, 2, 4)]
    assert len({plan.rank_of_stage for plan in lawful}) > 20
    for plan in lawful:
        check(Schedule(plan.text(), plan.rank_of_stage))


def test_these_tests_can_fail() -> None:
    """A schedule over one microbatch less gives another loss and other gradients."""
    total, grads = stages(2).run(get_schedule("1F1B", 2, 2), is_equal=True)
    expected, expected_grads = by_rows(2)(6)
    assert total != pytest.approx(expected, rel=1e-3)
    assert all(
        not np.allclose(ours, theirs, rtol=1e-3) for ours, theirs in zip(grads, expected_grads, strict=True)
    )
