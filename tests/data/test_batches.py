"""global_batch, pad_batch and join in one process; many processes are in tests/multiprocess."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar._errors import BatchError, MeshError
from jaxpar.data import global_batch, join, pad_batch
from jaxpar.mesh import init_device_mesh

MESH = init_device_mesh((2, 2, 2), ("dp", "fsdp", "tp"))


@pytest.mark.parametrize(
    ("axes", "spec", "rows_per_device"),
    [
        (("dp",), P("dp"), 4),
        ("fsdp", P("fsdp"), 4),
        (("dp", "fsdp"), P(("dp", "fsdp")), 2),
        ((), P(), 8),
    ],
)
def test_rows_lie_in_mesh_order(axes, spec, rows_per_device: int) -> None:
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    batch = global_batch({"x": x, "y": np.arange(8)}, MESH, axes)
    assert batch["x"].sharding == NamedSharding(MESH.jax_mesh, spec)
    np.testing.assert_array_equal(batch["x"], x)
    np.testing.assert_array_equal(batch["y"], np.arange(8))
    for shard in batch["x"].addressable_shards:
        assert shard.data.shape == (rows_per_device, 2)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_plain_mesh_and_any_size_serve(size: int) -> None:
    mesh = jax.make_mesh((size,), ("dp",), devices=jax.devices()[:size])
    assert global_batch(np.arange(4), mesh, "dp").addressable_shards[0].data.shape == (4 // size,)


def test_a_batch_that_lies_as_wanted_passes_through() -> None:
    batch = global_batch({"x": np.arange(8)}, MESH, ("dp",))
    assert global_batch(batch, MESH, ("dp",))["x"] is batch["x"]
    assert global_batch(batch, MESH, ("fsdp",))["x"].sharding.spec == P("fsdp")


def test_a_batch_that_does_not_divide_names_the_numbers_and_the_cure() -> None:
    with pytest.raises(
        BatchError,
        match=r"a batch of 6 samples .* dp=2 \* fsdp=2 \(4 positions\): 6 / 4 leaves 2.*pad_batch\(batch, 8\)",
    ):
        global_batch({"x": np.zeros(6)}, MESH, ("dp", "fsdp"))


def test_an_unknown_axis_is_named() -> None:
    with pytest.raises(MeshError, match="ddp"):
        global_batch(np.zeros(8), MESH, ("ddp",))


@pytest.mark.parametrize(
    ("batch", "pattern"),
    [
        ({"x": np.zeros(8), "y": {"z": np.zeros((6, 8))}}, r"disagree .*: 'x' has 8, 'y.z' has 6"),
        ({"x": np.zeros(8), "lr": np.float32(1)}, r"leaf 'lr' is a scalar"),
        ({}, "the batch has no arrays"),
    ],
)
@pytest.mark.parametrize("function", [lambda b: global_batch(b, MESH, "dp"), lambda b: pad_batch(b, 8)])
def test_leaves_must_agree_on_the_number_of_samples(function, batch, pattern: str) -> None:
    with pytest.raises(BatchError, match=pattern):
        function(batch)


def test_padding_repeats_the_last_row_and_masks_it() -> None:
    batch, mask = pad_batch({"x": np.array([[1, 2], [3, 4]], np.int8), "y": np.array([5.0, 6.0])}, 4)
    np.testing.assert_array_equal(batch["x"], [[1, 2], [3, 4], [3, 4], [3, 4]])
    np.testing.assert_array_equal(batch["y"], [5, 6, 6, 6])
    assert batch["x"].dtype == np.int8 and mask.dtype == bool and mask.tolist() == [True, True, False, False]


def test_padding_a_full_and_an_empty_batch() -> None:
    batch, mask = pad_batch(np.arange(4), 4)
    assert batch.tolist() == [0, 1, 2, 3] and mask.all()
    batch, mask = pad_batch(np.zeros((0, 2)), 3)
    assert batch.shape == (3, 2) and not mask.any()


def test_padding_below_the_size_is_refused() -> None:
    with pytest.raises(BatchError, match="has 5 samples, more than size=4"):
        pad_batch(np.zeros(5), 4)


@pytest.mark.parametrize("batches", [list, iter], ids=["with a length", "an iterator"])
def test_join_in_one_process_pads_to_the_first_size(batches) -> None:
    source = [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])]
    steps = list(join(batches(source)))
    assert [batch.shape for batch, _ in steps] == [(3,)] * 3
    assert [batch[mask].tolist() for batch, mask in steps] == [[1, 2, 3], [4], [5, 6]]


def test_join_of_nothing_needs_like_and_then_takes_no_step() -> None:
    assert list(join([], like=np.zeros(2))) == []
    with pytest.raises(BatchError, match=r"ranks \[0\] have no batch at all .* Pass like="):
        list(join([]))


def test_join_names_a_batch_larger_than_the_first() -> None:
    with pytest.raises(BatchError, match=r"batch 1 has 3 samples, more than the largest first batch \(2\)"):
        list(join([np.zeros(2), np.zeros(3)]))


def test_join_names_a_wrong_length() -> None:
    class Liar(list):
        def __len__(self) -> int:
            return 1

    with pytest.raises(BatchError, match="says it has 1 batches but yields more"):
        list(join(Liar([np.zeros(2), np.zeros(2)])))
