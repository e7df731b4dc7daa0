"""K10: checkpoints to safetensors files and back without the model; what comes back is what went, bit by bit."""

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxpar.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Tensors,
    checkpoint_to_safetensors,
    load_safetensors,
    metadata,
    safetensors_to_checkpoint,
    save_safetensors,
)
from jaxpar.checkpoint.__main__ import main
from jaxpar.fsdp import full_state, fully_shard
from jaxpar.mesh import init_device_mesh


class Layers(nnx.Module):
    """Several dtypes, a scalar, an array that is stored padded, and random keys."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(8, 4, rngs=rngs)
        self.half = nnx.Linear(4, 6, rngs=rngs, param_dtype=jnp.bfloat16)
        self.odd = nnx.Param(jax.random.normal(rngs.params(), (3, 5)))
        self.count = nnx.BatchStat(jnp.asarray(7 + seed))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.half(self.first(x)))


def sharded(seed: int, num_devices: int) -> Layers:
    model = Layers(seed)
    fully_shard(model, init_device_mesh((num_devices,), ("dp",), devices=jax.devices()[:num_devices]))
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    model = sharded(0, 4)
    optimizer = nnx.Optimizer(model, jax_adam(), wrt=nnx.Param)
    with CheckpointManager(folder) as manager:
        manager.save(5, sharded(1, 4))
        manager.save(9, model, optimizer)
    return folder


def jax_adam() -> optax.GradientTransformation:
    return optax.adam(0.1)


def weights(model: nnx.Module) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in full_state(model).items() if "dropout" not in name}


@pytest.mark.parametrize("budget_bytes", [1, 200, 1 << 20])
def test_a_checkpoint_becomes_files_and_a_checkpoint_again(
    run: Path, tmp_path: Path, budget_bytes: int
) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    checkpoint_to_safetensors(run, out, max_shard_bytes=150, budget_bytes=budget_bytes)
    assert len(list(out.glob("*.safetensors"))) > 1 and (out / "model.safetensors.index.json").exists()
    found = {name: x for file in out.glob("*.safetensors") for name, x in load_file(file).items()}
    expected = weights(Layers(0))
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    safetensors_to_checkpoint(out, again)
    model = sharded(2, 2)
    with CheckpointManager(again) as manager:
        restored = manager.restore(model, strict=False)
    assert restored is not None and restored.step == 0
    for name, x in weights(model).items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


def test_the_files_are_those_that_the_model_would_write(run: Path, tmp_path: Path) -> None:
    names = {"first.kernel": Tensors("first.weight", permute=(1, 0)), "count": None}
    options = {"names": names, "dtype": jnp.bfloat16}
    checkpoint_to_safetensors(run, tmp_path / "offline", **options)
    save_safetensors(sharded(0, 2), tmp_path / "online", **options)
    files = [tmp_path / which / "model.safetensors" for which in ("offline", "online")]
    offline, online = map(load_file, files)
    assert offline.keys() == online.keys() and offline["first.weight"].shape == (4, 8)
    for name, x in online.items():
        np.testing.assert_array_equal(offline[name], x, err_msg=name)


def test_a_step_and_the_optimizer_can_be_asked_for(run: Path, tmp_path: Path) -> None:
    checkpoint_to_safetensors(run, tmp_path / "five", step=5)
    assert load_safetensors(model := Layers(0), tmp_path / "five") == ()
    np.testing.assert_array_equal(model.odd[...], Layers(1).odd[...])
    checkpoint_to_safetensors(run, tmp_path / "adam", group="optimizer")
    found = load_file(tmp_path / "adam" / "model.safetensors")
    assert found.keys() == metadata(run, 9).arrays["optimizer"].keys()


def test_from_a_shell(run: Path, tmp_path: Path) -> None:
    """In a process of its own: with no model and, for looking, no backend."""
    command = [sys.executable, "-m", "jaxpar.checkpoint"]
    for words in (
        ["export", run, tmp_path / "out", "9", "--dtype", "float16"],
        ["import", tmp_path / "out", tmp_path / "again", "3"],
    ):
        done = subprocess.run([*command, *map(str, words)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "written" in done.stdout
    found = metadata(tmp_path / "again")
    assert found.step == 3 and found.arrays["model"]["first.kernel"].dtype == "float16"


def test_what_cannot_be_turned_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="does not have the checkpoint of step 4; it has those of"):
        checkpoint_to_safetensors(run, tmp_path, step=4)
    with pytest.raises(CheckpointError, match="no arrays in group 'extra'; it has"):
        checkpoint_to_safetensors(run, tmp_path, group="extra")
    assert main(["export", str(run), str(tmp_path / "x"), "--dtype", "float99"]) == 2
    assert "is float99, which is not written" in capsys.readouterr().err
    checkpoint_to_safetensors(run, tmp_path / "out")
    with pytest.raises(CheckpointError, match="has a checkpoint of step 9 already"):
        safetensors_to_checkpoint(tmp_path / "out", run, step=9)


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path) -> None:

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    victim = max(
        (copy / "9" / "model").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0
    )
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"is damaged: model/.* bytes and was written with .*there are \[5, 9\]"
    ):
        checkpoint_to_safetensors(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()
