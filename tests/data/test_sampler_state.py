"""DistributedSampler goes on where it was, among any number of ranks: each sample counts once per epoch."""

import json
import random

import numpy as np
import pytest

from jaxpar._errors import BatchError
from jaxpar.data import DistributedSampler
from jaxpar.data._order import DataState


def make(
    world_size: int, length: int, state: DataState | None, **options: object
) -> list[DistributedSampler]:
    """All ranks of a world that goes on from a state."""
    world = [
        DistributedSampler(length, num_replicas=world_size, rank=rank, **options)  # type: ignore[arg-type]
        for rank in range(world_size)
    ]
    for sampler in world:
        if state is not None:
            sampler.load_state_dict(state)
    return world


def use(world: list[DistributedSampler], num_used: int) -> tuple[list[int], DataState]:
    """What the ranks count in their first `num_used` samples, in the shared order, and the state after them."""
    rows = [sampler.indices()[sampler.mask()][:num_used].tolist() for sampler in world]
    states = [json.loads(json.dumps(sampler.state_dict(num_used))) for sampler in world]
    assert all(state == states[0] for state in states), "the same on all ranks"
    dealt = [rank_rows[i] for i in range(num_used) for rank_rows in rows if i < len(rank_rows)]
    return dealt, states[0]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [1, 7, 24, 50, 101])
def test_4_2_3_4_ranks_read_every_sample_once_in_the_order_of_one(length: int, shuffle: bool) -> None:
    options = {"shuffle": shuffle, "seed": 5}
    (alone,) = make(1, length, None, **options)
    seen, state = [], None
    for world_size, part in [(4, 0.3), (2, 0.5), (3, 0.4), (4, 1.0)]:
        world = make(world_size, length, state, **options)
        rows, state = use(world, int(part * len(world[0])))
        seen += rows
    assert seen == list(alone)
    assert state["offset"] == length


def test_any_worlds_stopped_anywhere_read_every_sample_once() -> None:
    chance = random.Random(0)
    for _ in range(300):
        length, epoch = chance.randrange(60), chance.randrange(3)
        seen, state = [], None
        for stop in range(5):
            world = make(chance.randrange(1, 9), length, state, seed=length)
            for sampler in world:
                sampler.set_epoch(epoch)  # as the resumed loop does: it keeps the offset
            used = len(world[0]) if stop == 4 else chance.randrange(len(world[0]) + 1)
            rows, state = use(world, used)
            seen += rows
        assert sorted(seen) == list(range(length))


def test_drop_last_after_a_change_of_ranks_drops_fewer_than_there_are() -> None:
    seen, state = use(make(4, 50, None, drop_last=True), 5)
    rest, state = use(make(3, 50, state, drop_last=True), 10)
    assert len(set(seen + rest)) == len(seen + rest) == 50 and state["offset"] == 50
    rest, state = use(make(7, 50, use(make(4, 50, None), 5)[1], drop_last=True), 4)
    assert len(set(seen + rest)) == 48 and state["offset"] == 48


def test_reading_ahead_moves_nothing() -> None:
    sampler = DistributedSampler(20, num_replicas=2, rank=0)
    ahead = iter(sampler)
    read = [next(ahead) for _ in range(6)]
    sampler.load_state_dict(sampler.state_dict(2))
    assert list(sampler)[:4] == read[2:]


def test_the_next_epoch_is_whole_again_and_as_if_nothing_had_happened() -> None:
    (sampler,) = make(1, 20, make(4, 20, None)[0].state_dict(3))
    assert sampler.epoch == 0 and sampler.offset == 12 and len(sampler) == 8
    sampler.set_epoch(1)
    (fresh,) = make(1, 20, None)
    fresh.set_epoch(1)
    assert list(sampler) == list(fresh) and len(sampler) == 20


def test_a_state_of_the_end_leaves_nothing_of_its_epoch() -> None:
    (sampler,) = make(1, 10, make(4, 10, None)[0].state_dict(3))
    assert list(sampler) == [] and sampler.mask().shape == (0,)


def test_more_than_a_rank_reads_cannot_be_used() -> None:
    with pytest.raises(
        BatchError,
        match=r"num_used=4, but rank 1 of 4 reads 3 samples in this pass, which began at sample 0 of the 10",
    ):
        DistributedSampler(10, num_replicas=4, rank=1).state_dict(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 11}, r"another order, with length=11 \(here 10\)\. "),
        ({"seed": 1, "shuffle": False}, r"with seed=1 \(here 0\), shuffle=False \(here True\)"),
        ({"seed": None}, r"with seed=None \(here 0\)"),
        ({"offset": 11}, r"offset=11 is no point in an order of 10 samples"),
        ({"offset": -1}, r"'offset' of the state must be a count, not -1"),
        ({"epoch": "2"}, r"'epoch' of the state must be a count, not '2'"),
        ({"first_samples": [0, 1, 2, 3]}, r"begins with \[.*\] here, but with \[0, 1, 2, 3\] where .* NumPy"),
    ],
)
def test_a_state_of_another_order_is_refused_with_its_numbers_and_changes_nothing(
    change: dict, message: str
) -> None:
    sampler = DistributedSampler(10, num_replicas=2, rank=0)
    before = list(sampler)
    state = sampler.state_dict(2) | change
    with pytest.raises(BatchError, match=message):
        sampler.load_state_dict(state)
    assert list(sampler) == before and sampler.offset == 0


def test_what_is_no_state_is_refused() -> None:
    sampler = DistributedSampler(10, num_replicas=2, rank=0)
    state = sampler.state_dict(2)
    del state["seed"]
    with pytest.raises(BatchError, match=r"load_state_dict: the state has no 'seed'; it has \['epoch', "):
        sampler.load_state_dict(state)
    with pytest.raises(BatchError, match=r"the dict that state_dict returned, not None"):
        sampler.load_state_dict(None)  # type: ignore[arg-type]


def test_a_restart_reads_the_same_bytes_as_no_restart() -> None:
    whole = DistributedSampler(64, num_replicas=2, rank=1, seed=9)
    resumed = DistributedSampler(64, num_replicas=2, rank=1, seed=9)
    resumed.load_state_dict(whole.state_dict(10))
    np.testing.assert_array_equal(resumed.indices(), whole.indices()[10:])
