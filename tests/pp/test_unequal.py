"""Microbatches that are not equal, and schedules that run several times in a step: exact, at 1e-12."""

import functools
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
from jaxpar._errors import ParallelizeError
from jaxpar.pp import get_schedule, pipeline
from jaxpar.pp._dealt import dealt, num_larger

sys.path.insert(0, str(Path(__file__).parent))
from pipeline_rig import Model, Outcome, Rig, batch_of, on_one_device, pipelined

RTOL = 1e-12
ROWS = 12


pytestmark = pytest.mark.usefixtures("float64_values_only")


@functools.cache
def expected() -> Outcome:
    """The whole batch at once, on one device; masks of dropout depend on rows alone."""
    return on_one_device(Model(2), batch_of(ROWS), accumulate=1).run()


@pytest.mark.parametrize(("num_rows", "num_parts"), [(10, 4), (12, 5), (7, 7), (8, 4), (9, 2)])
def test_rows_are_dealt_as_evenly_as_can_be(num_rows: int, num_parts: int) -> None:
    larger = num_larger(num_rows, num_parts)
    found = []
    for part in range(num_parts):
        rows, first = dealt(num_rows, num_parts, is_smaller=larger > 0 and part >= larger)
        found += range(part * rows + first, part * rows + first + rows)
    assert found == list(range(num_rows))
    sizes = [len(part) for part in np.array_split(np.arange(num_rows), num_parts)]
    assert sizes[:larger] == [num_rows // num_parts + 1] * larger


def test_five_microbatches_of_twelve_rows() -> None:
    """Parts of 3, 3, 2, 2 and 2 rows: a weighted loss, a norm, means without a count, dropout by row."""
    two = pipelined(Model(2), get_schedule("1F1B", 2, 5), batch_of(ROWS))
    for name in ("1F1B", "ZBH1"):
        two.run(get_schedule(name, 2, 5)).assert_equals(expected(), RTOL)
    assert float(two.step.evaluate(two.batch)["weight"]) == pytest.approx(
        batch_of(ROWS)["weights"].mean(), rel=1e-12
    )


@pytest.mark.parametrize(("accumulate", "n_microbatches"), [(3, 2), (2, 4)], ids=["equal", "unequal"])
def test_the_schedule_runs_several_times_before_one_update(accumulate: int, n_microbatches: int) -> None:
    schedule = get_schedule("1F1B", 2, n_microbatches)
    pipelined(Model(2), schedule, batch_of(ROWS), accumulate=accumulate).run().assert_equals(expected(), RTOL)


def test_unequal_microbatches_on_ranks_that_split_the_batch() -> None:
    """Each of two ranks has five rows, in parts of three and two."""
    mesh = jaxpar.init_device_mesh((2, 2), ("pp", "dp"), devices=jax.devices()[:4])
    model = pipeline(Model(2), mesh["pp"], n_stages=2, n_microbatches=2)
    four = Rig(model, mesh, batch_of(10), batch_axes="dp")
    four.run().assert_equals(on_one_device(Model(2), batch_of(10), accumulate=1).run(), RTOL)


class Scale(nnx.Module):
    def __init__(self) -> None:
        self.scale, self.other = nnx.Param(jnp.float64(1.0)), nnx.Param(jnp.float64(1.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale


def scales(loss: Any, n_microbatches: int = 3, **options: Any) -> tuple[Any, jaxpar.TrainStep]:
    mesh = jaxpar.init_device_mesh((2,), ("pp",), devices=jax.devices()[:2])
    model = pipeline(nnx.Sequential(Scale(), Scale()), mesh["pp"], n_microbatches=n_microbatches)
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    return model, jaxpar.TrainStep(loss, model, optimizer, mesh=mesh, **options)


@pytest.mark.parametrize(
    ("num_rows", "n_microbatches", "accumulate"),
    [(4, 2, 1), (5, 2, 1), (8, 2, 2), (7, 2, 2)],
    ids=["PP20 equal", "PP21 unequal", "PP22 accumulated", "PP21 PP22 both"],
)
def test_gradients_of_a_mean_are_exact(num_rows: int, n_microbatches: int, accumulate: int) -> None:
    """PP20, PP21, PP22, W6: no error at all, where PyTorch's is 0.2 for five rows in two microbatches, and 1.5 g is taken for 2 g."""
    model, step = scales(lambda m, x: m(x).mean(), n_microbatches, accumulate=accumulate)
    x = np.arange(1.0, num_rows + 1) * num_rows  # mean: a whole number or a half
    assert float(step(x)["loss"]) == x.mean()
    assert [float(layer.scale.get_value()) for layer in model.layers] == [1.0 - x.mean()] * 2


def test_a_mean_over_rows_is_no_mean_of_means() -> None:
    """Case PP-2, pytorch#126600: with 3, 3 and 2 rows the mean of means is 4.8333."""
    model, step = scales(lambda m, x: m(x).mean())
    np.testing.assert_allclose(step(np.arange(1.0, 9.0))["loss"], 4.5, rtol=1e-15)
    np.testing.assert_allclose(model.layers[0].scale.get_value(), 1.0 - 4.5, rtol=1e-15)


def test_a_loss_that_does_another_thing_with_one_row_less_is_refused() -> None:
    _, step = scales(lambda m, x: m(x).mean() * (m.layers[1].other if x.shape[0] == 2 else 1.0))
    with pytest.raises(
        ParallelizeError, match="stage 1 uses other variables.*rows divide into 3 microbatches"
    ):
        step(np.arange(1.0, 9.0))
