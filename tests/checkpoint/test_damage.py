"""Files that were changed, cut short or lost: named, and the checkpoint before is used. Disk full: an error, nothing lost."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint import type_handlers

import jaxpar.checkpoint
from jaxpar.checkpoint import CheckpointError, CheckpointManager


def two_checkpoints(folder: Path, **options: object) -> None:
    with CheckpointManager(folder, **options) as manager:  # pyright: ignore[reportArgumentType]
        for step in (1, 2):
            manager.save(step, nnx.Linear(64, 32, rngs=nnx.Rngs(step)), data_state={"offset": step})


def largest(folder: Path) -> Path:
    """The file with the arrays."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip, r"was changed since it was written: its checksum differs"),
        (cut, r"has \d+ bytes and was written with \d+"),
        (Path.unlink, r"cannot be read: No such file"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage, said: str) -> None:
    two_checkpoints(tmp_path)
    damage(largest(tmp_path / "2" / "model"))
    model = nnx.Linear(64, 32, rngs=nnx.Rngs(9))
    with CheckpointManager(tmp_path) as manager:
        with pytest.warns(UserWarning, match=rf"Step 2 is damaged: .*{said}.* step 1 is used"):
            found = manager.restore(model)
        with pytest.raises(CheckpointError, match=rf"no checkpoint can be read: Step 2 is damaged: .*{said}"):
            manager.restore(model, step=2)
    assert found is not None and (found.step, found.data_state) == (1, {"offset": 1})
    np.testing.assert_array_equal(model.kernel[...], nnx.Linear(64, 32, rngs=nnx.Rngs(1)).kernel[...])


def test_every_file_counts(tmp_path: Path) -> None:
    """Whatever file is cut short, restoring falls back; but for those that hold nothing of the model."""
    two_checkpoints(tmp_path)
    unlisted = set()
    for path in sorted(p for p in (tmp_path / "2").rglob("*") if p.is_file() and p.stat().st_size):
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        with CheckpointManager(tmp_path) as manager, warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            found = manager.restore(nnx.Linear(64, 32, rngs=nnx.Rngs(9)))
        assert found is not None
        if found.step == 2:
            unlisted.add(path.name)
        path.write_bytes(data)
    assert unlisted <= {"_CHECKPOINT_METADATA", "commit_success.txt"}


def test_without_checksums_sizes_still_count(tmp_path: Path) -> None:
    two_checkpoints(tmp_path, checksums=False)
    cut(largest(tmp_path / "2" / "model"))
    with CheckpointManager(tmp_path) as manager, pytest.warns(UserWarning, match="Step 2 is damaged"):
        found = manager.restore(nnx.Linear(64, 32, rngs=nnx.Rngs(9)))
    assert found is not None and found.step == 1


def test_all_damaged(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    for step in (1, 2):
        flip(largest(tmp_path / str(step) / "model"))
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(
            CheckpointError, match=r"Step 2 is damaged: .* Step 1 is damaged: .*Restore the files from a copy"
        ):
            manager.restore(nnx.Linear(64, 32, rngs=nnx.Rngs(9)))


def test_what_a_killed_save_left_is_no_checkpoint(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == [1]
        manager.save(3, nnx.Linear(64, 32, rngs=nnx.Rngs(3)))
    assert not (tmp_path / "2.orbax-checkpoint-tmp").exists()


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "weights.bin").write_bytes(b"x")
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointError, match=r"files.json is missing: this is no complete checkpoint"):
            manager.restore(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("is_async", [True, False])
def test_disk_full_is_an_error_and_the_last_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    manager = CheckpointManager(tmp_path, is_async=is_async)
    manager.save(1, model)
    manager.wait()

    async def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type_handlers.ArrayHandler, "serialize", full)
        patch.setattr(type_handlers.NumpyHandler, "serialize", full)
        said = r"step 2 in .* was not written \(OSError: .*No space left.*\); the last complete one is that of step 1"
        with pytest.raises(CheckpointError, match=said):
            manager.save(2, model)
            manager.wait()
    assert manager.steps() == [1]
    manager.save(3, model)
    manager.close()
    assert manager.steps() == [1, 3]


@pytest.mark.parametrize("kind", [str, Path])
def test_an_address_is_no_folder(kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Path` makes "gs:/bucket/run" of it: a folder of this disk, where nobody would look for the run."""
    monkeypatch.chdir(tmp_path)
    address, model = kind("gs://bucket/run"), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    for use in (
        lambda: CheckpointManager(address),
        lambda: jaxpar.checkpoint.metadata(address),
        lambda: jaxpar.checkpoint.save_safetensors(model, address),
        lambda: jaxpar.checkpoint.load_safetensors(model, address),
        lambda: jaxpar.checkpoint.checkpoint_to_safetensors(address, tmp_path / "out"),
    ):
        with pytest.raises(CheckpointError, match="bucket/run is an address.*: mount the bucket"):
            use()
    assert not list(tmp_path.iterdir())
