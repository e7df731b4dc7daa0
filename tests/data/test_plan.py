"""Global batches are the same samples in the same rows under any number of ranks, also when it changes on the way."""

import random

import numpy as np
import pytest

from jaxpar._errors import BatchError
from jaxpar.data import DistributedSampler
from jaxpar.data._order import DataState, SharedOrder
from jaxpar.data._plan import BatchPlan, plan_batches


def world(num_ranks: int, length: int, state: DataState | None = None, **options) -> list[DistributedSampler]:
    samplers = [
        DistributedSampler(length, num_replicas=num_ranks, rank=rank, **options) for rank in range(num_ranks)
    ]
    for sampler in samplers:
        if state:
            sampler.load_state_dict(state)
    return samplers


def batches_of(samplers: list[DistributedSampler], size: int) -> tuple[list[list[int]], list[DataState]]:
    """The real rows of each global batch, joined in the order of ranks, and the state after it."""
    by_rank = [list(sampler.batches(size)) for sampler in samplers]
    batches, states = [], []
    for parts in zip(*by_rank, strict=True):
        assert len({part.indices.shape for part in parts}) == 1, "equally many rows on every rank"
        assert all(part.state == parts[0].state for part in parts)
        mask = np.concatenate([part.mask for part in parts])
        assert not np.any(mask[1:] > mask[:-1]), "what fills up is at the end"
        rows = np.concatenate([part.indices for part in parts])
        assert set(rows[~mask]) <= set(rows[mask]), "and repeats a sample of the batch"
        batches.append(rows[mask].tolist())
        states.append(parts[0].state)
    return batches, states


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [0, 1, 12, 29, 100])
def test_any_number_of_ranks_sees_the_batches_of_one(length: int, drop_last: bool) -> None:
    for size in (1, 5, 12, 40):
        alone, _ = batches_of(world(1, length, drop_last=drop_last), size)
        order = list(DistributedSampler(length, num_replicas=1, rank=0))
        kept = length // size * size if drop_last else length
        assert alone == [order[i : i + size] for i in range(0, kept, size)]
        for num_ranks in (2, 3, 4, 7):
            assert batches_of(world(num_ranks, length, drop_last=drop_last), size)[0] == alone


def test_worlds_that_change_anywhere_see_the_batches_of_one() -> None:
    chance = random.Random(1)
    for _ in range(100):
        length, size, seed = chance.randrange(1, 80), chance.randrange(1, 20), chance.randrange(5)
        expected, _ = batches_of(world(1, length, seed=seed), size)
        seen, state = [], None
        while len(seen) < len(expected):
            batches, states = batches_of(world(chance.randrange(1, 9), length, state, seed=seed), size)
            used = chance.randrange(len(batches) + 1)
            seen += batches[:used]
            state = states[used - 1] if used else state
        assert seen == expected and state is not None and state["offset"] == length


def test_another_batch_size_goes_on_at_the_same_sample() -> None:
    first, states = batches_of(world(4, 50), 8)
    rest, states = batches_of(world(2, 50, states[2]), 10)
    order = list(DistributedSampler(50, num_replicas=1, rank=0))
    assert sum(first[:3] + rest, []) == order and [len(batch) for batch in rest] == [10, 10, 6]


def test_states_of_the_sampler_and_of_its_batches_are_the_same_point() -> None:
    (sampler,) = world(1, 40)
    assert sampler.batches(8)[2].state == sampler.state_dict(24)


def test_batches_can_be_counted_and_asked_for() -> None:
    batches = DistributedSampler(10, num_replicas=2, rank=1, shuffle=False).batches(4)
    assert len(batches) == 3
    np.testing.assert_array_equal(batches[-1].indices, batches[2].indices)
    np.testing.assert_array_equal(batches[1].indices, [6, 7])
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"batch {index} of 3"):
            batches[index]


@pytest.mark.parametrize(
    ("size", "num_positions", "multiple_of", "each"), [(8, 4, 1, 2), (8, 3, 1, 3), (8, 3, 2, 4), (1, 4, 2, 2)]
)
def test_rows_fill_up_to_what_devices_and_microbatches_divide(size, num_positions, multiple_of, each) -> None:
    assert plan(size, [1], num_positions, multiple_of).rows.tolist() == list(range(each, 2 * each))


def test_positions_need_not_be_neighbours() -> None:
    assert plan(8, [0, 2], 4).rows.tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize(
    ("size", "multiple_of", "message"),
    [(0, 1, "global_batch_size=0, but"), (4, 0, "rows_multiple_of=0, but it is a number of rows")],
)
def test_what_is_no_count_is_refused(size: int, multiple_of: int, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        plan(size, [0], 1, multiple_of)


def plan(size: int, positions: list[int], num_positions: int, multiple_of: int = 1) -> BatchPlan:
    return plan_batches(
        SharedOrder(20, shuffle=False, seed=0),
        size,
        positions=positions,
        num_positions=num_positions,
        multiple_of=multiple_of,
        drop_last=False,
        caller="test",
    )
