"""DistributedSampler: PyTorch's split, each sample counted once."""

import numpy as np
import pytest

from jaxpar._errors import BatchError
from jaxpar.data import DistributedSampler


def samplers(length: int, world_size: int, **options: object) -> list[DistributedSampler]:
    return [
        DistributedSampler(length, num_replicas=world_size, rank=rank, **options)
        for rank in range(world_size)
    ]  # type: ignore[arg-type]


def test_the_split_is_that_of_pytorch() -> None:
    got = [list(sampler) for sampler in samplers(10, 4, shuffle=False)]
    assert got == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    assert [list(s) for s in samplers(10, 4, shuffle=False, drop_last=True)] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
@pytest.mark.parametrize("length", [0, 1, 3, 8, 10, 29])
def test_every_sample_is_unmasked_exactly_once(length: int, world_size: int, shuffle: bool) -> None:
    all_samplers = samplers(length, world_size, shuffle=shuffle, seed=3)
    assert len({len(list(s)) for s in all_samplers}) == 1 and all(
        len(s) == len(list(s)) for s in all_samplers
    )
    unmasked = np.concatenate([s.indices()[s.mask()] for s in all_samplers])
    assert sorted(unmasked.tolist()) == list(range(length))


@pytest.mark.parametrize("length", [3, 8, 10, 29])
def test_drop_last_reads_no_sample_twice_and_masks_none(length: int) -> None:
    all_samplers = samplers(length, 4, drop_last=True)
    read = np.concatenate([s.indices() for s in all_samplers])
    assert len(set(read.tolist())) == len(read) == length // 4 * 4 and all(
        s.mask().all() for s in all_samplers
    )


def test_the_order_differs_by_epoch_and_seed_and_is_reproducible() -> None:
    def order(epoch: int, seed: int = 0) -> list[int]:
        sampler = DistributedSampler(100, num_replicas=2, rank=1, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0) == order(0) and order(3) == order(3)
    assert len({tuple(order(0)), tuple(order(1)), tuple(order(0, seed=1)), tuple(order(1, seed=1))}) == 4


def test_a_data_set_gives_its_length_and_a_lone_process_reads_all() -> None:
    assert sorted(DistributedSampler("abcdefg")) == list(range(7))


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"rank={rank} is not one of num_replicas=4: ranks are 0 to 3"):
        DistributedSampler(10, num_replicas=4, rank=rank)


def test_a_count_below_its_least_is_refused() -> None:
    with pytest.raises(BatchError, match="cannot split 10 samples among num_replicas=0"):
        DistributedSampler(10, num_replicas=0, rank=0)
