"""The timeline of a run: every action once, in the schedule's order, after what it waits for; written beside the simulated one."""

import json
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
from jaxpar._errors import ParallelizeError, ScheduleError
from jaxpar.pp import Action, Costs, Schedule, get_schedule, pipeline, simulate
from jaxpar.pp._schedule._measured import measured_timeline

X = np.ones((8, 64), np.float32)


class Busy(nnx.Module):
    """Long enough for a clock: a loop of matmuls."""

    def __init__(self, num: int) -> None:
        self.kernel = nnx.Param(0.1 * jnp.eye(64))
        self.num = num

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, self.num, lambda _, x: jnp.tanh(x @ self.kernel), x)


def make_step(schedule: Schedule, nums: tuple[int, ...], **options: Any) -> jaxpar.TrainStep:
    mesh = jaxpar.init_device_mesh((schedule.n_ranks,), ("pp",), devices=jax.devices()[: schedule.n_ranks])
    model = pipeline(nnx.Sequential(*map(Busy, nums)), mesh["pp"], n_stages=len(nums), schedule=schedule)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh, **options)


@pytest.mark.parametrize("name", ["1F1B", "ZBH1"])
def test_a_trace_shows_every_action_after_what_it_waits_for(name: str, tmp_path: Path) -> None:
    schedule = get_schedule(name, 2, 4)
    step = make_step(schedule, (400, 400))
    before, interval = float(step.evaluate(X)["loss"]), sys.getswitchinterval()
    timeline = step.trace(X, tmp_path / "pp.json", repeats=1)
    assert float(step.evaluate(X)["loss"]) == before and sys.getswitchinterval() == interval
    ends = {event.action: event.end for row in timeline.events for event in row}
    for rank, row in enumerate(timeline.events):
        assert [event.action for event in row] == [a for a in schedule.rows[rank] if a is not None]
        assert all(first.end <= then.start for first, then in zip(row, row[1:], strict=False))
        assert all(0 <= event.start <= event.end for event in row)
        for event in row:
            action = event.action
            if action.op.value != "W":
                source = Action.parse(f"{1 - action.stage}{action.op.value}{action.microbatch}")
                waits = (action.op.value == "F") == (action.stage == 1)
                assert not waits or ends[source] <= event.start
    assert len(timeline.messages) == 2 * 4
    assert timeline.makespan == max(ends.values())
    trace = json.loads((tmp_path / "pp.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert processes == {0: "measured", 1: "simulated"}
    for pid in processes:
        slices = [e["name"] for e in trace if e["ph"] == "X" and e["pid"] == pid]
        assert sorted(slices) == sorted(str(action) for action in ends)
    arrows = [e["id"] for e in trace if e["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) == 2 * 8
    picture = (tmp_path / "pp.svg").read_text()
    assert "measured: " in picture and "simulated: " in picture


def test_a_slow_stage_is_seen_to_be_slow(tmp_path: Path) -> None:
    timeline = make_step(get_schedule("GPipe", 2, 2), (10, 8000)).trace(X, tmp_path / "pp.json", repeats=3)
    assert timeline.busy[1] > 2 * timeline.busy[0]
    assert (
        simulate(timeline.schedule, timeline.costs).busy[1]
        > 2 * simulate(timeline.schedule, timeline.costs).busy[0]
    )


def test_starts_are_what_an_action_waited_for() -> None:
    schedule = Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    times = {"0F0": (9.0, 11.0), "0F1": (9.1, 12.0), "1F0": (9.2, 13.0), "1B0": (9.3, 15.0), "0B0": (9.4, 16.5),
             "1F1": (15.5, 16.0), "1B1": (9.6, 18.0), "0B1": (9.7, 19.0)}  # fmt: skip
    timeline = measured_timeline(schedule, Costs(), {Action.parse(a): t for a, t in times.items()})
    starts = {str(event.action): event.start for row in timeline.events for event in row}
    assert starts == {
        "0F0": 0.0,  # dispatched, and the beginning
        "0F1": 2.0,  # behind 0F0
        "0B0": 6.0,  # 1B0 has ended
        "0B1": 9.0,  # 1B1 has ended
        "1F0": 2.0,  # 0F0 has ended
        "1B0": 4.0,
        "1F1": 6.5,  # dispatched late
        "1B1": 7.0,
    }
    assert timeline.makespan == 10.0
    assert [(m.source, m.target, str(m.action)) for m in timeline.messages] == [
        (0, 1, "0F0"), (0, 1, "0F1"), (1, 0, "1B0"), (1, 0, "1B1")
    ]  # fmt: skip


def test_what_cannot_be_traced(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"a trace is a .json file, .*Write '.*pp.json'"):
        make_step(get_schedule("GPipe", 2, 2), (1, 1)).trace(X, tmp_path / "pp.svg")
    with pytest.raises(ScheduleError, match="is no folder. Make it first"):
        make_step(get_schedule("GPipe", 2, 2), (1, 1)).trace(X, tmp_path / "nowhere" / "pp.json")
    model = Busy(1)
    mesh = jaxpar.init_device_mesh((1,), ("dp",), devices=jax.devices()[:1])
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step = jaxpar.TrainStep(lambda m, x: (m(x) ** 2).mean(), model, optimizer, mesh=mesh)
    with pytest.raises(ParallelizeError, match="schedule, and the model has none.*jax.profiler.trace"):
        step.trace(X, tmp_path / "pp.json")
