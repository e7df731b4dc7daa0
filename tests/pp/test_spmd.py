"""One program for a whole schedule equals one device, as the executor that walks the grid does: float64 at 1e-12.

A rig compiles what begins and ends a step once; every schedule is a program of its own, so schedules are sampled here: one stage for
each rank, loops, V, and random ones; ranks 1, 2, 3 and 4; fewer microbatches than ranks, as many, and more. The reference is that of
test_pipeline.py, so the executors equal each other. That every schedule is right is proved in test_contract.py, without a program.
Microbatches that the rows do not divide into are refused, by name.
"""

import functools
import itertools
import random
import re
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
from jaxpar._errors import BatchError, ParallelizeError
from jaxpar.debug import assert_collectives, memory
from jaxpar.pp import Schedule, get_schedule, pipeline

sys.path.insert(0, str(Path(__file__).parent))
from pipeline_rig import (
    HIDDEN,
    LENGTH,
    Model,
    Outcome,
    Rig,
    all_forwards_first,
    batch_of,
    on_one_device,
    pipelined,
)
from random_schedules import random_plan
from test_pipeline import Normed, squares

RTOL = 1e-12
ROWS = 12


pytestmark = pytest.mark.usefixtures("float64")


@functools.cache
def accumulated(depth: int) -> Outcome:
    """One device; dropout draws by row, so it is the reference of any number of microbatches."""
    return on_one_device(Model(depth), batch_of(ROWS), accumulate=4).run(num_steps=2)


@functools.cache
def rig(rank_of_stage: tuple[int, ...], n_microbatches: int) -> Rig:
    schedule = all_forwards_first(rank_of_stage, n_microbatches)
    model = Model(len(rank_of_stage))
    return pipelined(model, schedule, batch_of(ROWS), executor="spmd")


def check(schedule: Schedule) -> None:
    ours = rig(schedule.rank_of_stage, schedule.n_microbatches).run(schedule, num_steps=2)
    ours.assert_equals(accumulated(schedule.n_stages), RTOL)


# Every schedule


@pytest.mark.parametrize("name", ["1F1B", "LockStep1F1B", "ZBH2"])
def test_one_stage_per_rank(name: str) -> None:
    check(get_schedule(name, 2, 4))


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZB1P"])
def test_stages_go_round_the_ranks(name: str) -> None:
    check(get_schedule(name, 2, 2, stages_per_rank=2))


@pytest.mark.parametrize(("name", "n_microbatches"), [("ZBV", 2), ("DualPipeV", 4)])
def test_stages_go_there_and_back(name: str, n_microbatches: int) -> None:
    """At the turn nothing is sent; a rank's stages send both ways; DualPipeV has pairs of two stages."""
    check(get_schedule(name, 2, n_microbatches))


def test_a_random_lawful_schedule_on_ranks_in_no_order() -> None:
    """Messages go one rank on, and two; F, B, I and W of a stage in an order that nobody would choose."""
    plans = (random_plan(random.Random(seed)) for seed in range(1000))
    plan = next(
        plan
        for plan in plans
        if len(plan.rank_of_stage) == 4
        and max(plan.rank_of_stage) == 2
        and {(b - a) % 3 for a, b in itertools.pairwise(plan.rank_of_stage)} == {1, 2}
        and ROWS % Schedule(plan.text(), plan.rank_of_stage).n_microbatches == 0
    )
    schedule = Schedule(plan.text(), plan.rank_of_stage)
    assert {"I", "B"} <= {token[1] for row in plan.rows for token in row if token}
    check(schedule)


@pytest.mark.parametrize(("n_ranks", "n_microbatches"), [(1, 3), (4, 3)])
def test_other_numbers_of_ranks_and_microbatches(n_ranks: int, n_microbatches: int) -> None:
    check(get_schedule("LockStep1F1B", n_ranks, n_microbatches))


def test_float32_and_remat() -> None:
    batch, schedule = batch_of(ROWS, np.float32), get_schedule("ZBH1", 2, 4)
    model = functools.partial(Model, 2, dtype=jnp.float32)
    ours = pipelined(model(), schedule, batch, remat=True, executor="spmd")
    ours.run().assert_equals(on_one_device(model(), batch, accumulate=4).run(), 1e-5)


def test_variables_go_from_microbatch_to_microbatch_within_their_stages() -> None:
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 4)), "y": rng.normal(size=(8, 1))}
    # A bias before a batch norm has no gradient but rounding, which AdamW would blow up.
    options: dict[str, Any] = {"loss": squares, "tx": optax.sgd(0.1, momentum=0.9)}
    rigs = [
        pipelined(
            Normed(), get_schedule("1F1B", 3, 4), batch, splits=["norm", "down"], executor=executor, **options
        )
        for executor in ("mpmd", "spmd")
    ]
    one, other = rigs
    other.run().assert_equals(one.run(), RTOL)
    statistics = [jax.tree.leaves(nnx.state(r.model, nnx.BatchStat)) for r in rigs]
    for ours, theirs in zip(*statistics, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=RTOL)


# The program


@functools.cache
def compiled(name: str, n_microbatches: int) -> Any:
    """Two rows in each microbatch."""
    batch = batch_of(2 * n_microbatches)
    four = pipelined(Model(4, dropout=0.0), get_schedule(name, 4, n_microbatches), batch, executor="spmd")
    return four.step.lower(batch).compile()


@pytest.mark.parametrize(("name", "num_ticks"), [("LockStep1F1B", 8 + 7), ("1F1B", 2 * (8 + 3))])
def test_in_every_tick_one_message_goes_each_way_and_nothing_else(name: str, num_ticks: int) -> None:
    assert_collectives(compiled(name, 8), expected={("collective_permute", "pp"): 2 * num_ticks})


def test_memory_does_not_grow_with_the_number_of_microbatches() -> None:
    assert memory(compiled("1F1B", 8)).temp_bytes == memory(compiled("1F1B", 32)).temp_bytes


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax 0.10's XLA copies what goes through a choice")
@pytest.mark.parametrize("name", ["LockStep1F1B", "1F1B"])
def test_registers_are_written_in_place(name: str) -> None:
    """The hidden layers that rank 0 keeps, of all its microbatches, are one array; it is never copied."""
    text = compiled(name, 8).as_text()
    pools = set(re.findall(rf"f64\[\d+,2,{LENGTH},{HIDDEN}\]", text))
    assert pools and f"f64[2,{LENGTH},{HIDDEN}]" in text
    assert not [
        pool for pool in pools for line in text.splitlines() if f"= {pool}" in line and " copy(" in line
    ]


def test_arrays_of_stages_are_used_where_they_lie() -> None:
    """Neither parameters nor gradients are copied on their way into the program and out of it."""
    two = rig((0, 1), 4)
    two.run(num_steps=1)
    engine: Any = two.step._engine
    found = next(iter(engine._compiled.values()))
    leaves = jax.tree.leaves(two.batch)
    arrays = engine._arrays(found, leaves)
    pointers = [[x.unsafe_buffer_pointer() for x in (*a.sums, *a.grads)] for a in arrays]
    params = [[x.unsafe_buffer_pointer() for x in a.params] for a in arrays]
    found.program(engine._plan.schedule, arrays, engine._counts(found.stages))
    assert [[x.unsafe_buffer_pointer() for x in (*a.sums, *a.grads)] for a in arrays] == pointers
    assert [[x.unsafe_buffer_pointer() for x in a.params] for a in arrays] == params


# What is refused


def test_an_executor_that_does_not_exist_is_refused() -> None:
    mesh = jaxpar.init_device_mesh((2,), ("pp",), devices=jax.devices()[:2])
    with pytest.raises(ParallelizeError, match=re.escape("executor='mpdm' is none of ('mpmd', 'spmd')")):
        pipeline(Model(2), mesh["pp"], n_microbatches=2, executor="mpdm")  # pyright: ignore[reportArgumentType]


def test_a_schedule_that_is_walked_has_no_program_to_lower() -> None:
    two = pipelined(Model(2), get_schedule("1F1B", 2, 4), batch_of(ROWS))
    with pytest.raises(ParallelizeError, match=r"or give pipeline\(executor=\"spmd\"\)"):
        two.step.lower(batch_of(ROWS))


def test_microbatches_that_are_not_equal_are_refused() -> None:
    two = pipelined(Model(2), get_schedule("1F1B", 2, 4), batch_of(13), executor="spmd")
    with pytest.raises(
        BatchError,
        match=r"1 ranks x 4 microbatches: 13 % 4 = 1.*pad_batch\(batch, 16\).*or take executor=.mpmd",
    ):
        two.step(batch_of(13))


def test_several_runs_of_a_schedule_before_one_update_are_refused() -> None:
    with pytest.raises(
        ParallelizeError, match="accumulate=3 runs .* Write n_microbatches=12: .* Or take executor=.mpmd"
    ):
        pipelined(Model(2), get_schedule("1F1B", 2, 4), batch_of(ROWS), executor="spmd", accumulate=3)


def test_evaluation_of_what_one_program_trains() -> None:
    """Forward only, stage by stage on their own devices: nothing is lost between the two ways to run."""
    two = rig((0, 1), 4)
    two.run(num_steps=1)
    before = float(two.step.evaluate(two.batch)["loss"])
    assert before == pytest.approx(float(two.step(two.batch)["loss"]), rel=RTOL)
    assert float(two.step.evaluate(two.batch)["loss"]) < before
