"""What a folder holds, from Python and from a shell, in a process that starts no backend."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpar.checkpoint import ArrayMetadata, CheckpointError, CheckpointManager, metadata, verify
from jaxpar.checkpoint.__main__ import main
from jaxpar.fsdp import fully_shard
from jaxpar.mesh import init_device_mesh


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a sharded layer with dropout; the second is cut short."""
    folder = tmp_path_factory.mktemp("checkpoints")
    mesh = init_device_mesh((4,), ("dp",), devices=jax.devices()[:4])
    model = nnx.Sequential(
        nnx.Linear(8, 4, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    )
    fully_shard(model, mesh["dp"])
    with CheckpointManager(folder) as manager:
        manager.save(10, model, data_state={"epoch": 1}, extra={"run": "a"}, metrics={"loss": 0.25})
        manager.save(20, model)
    (folder / "20" / "contents" / "metadata").write_bytes(b"{}")
    return folder


def test_names_shapes_and_what_was_saved_beside_them(folder: Path) -> None:
    found = metadata(folder, 10)
    kernel = found.arrays["model"]["layers.0.kernel"]
    assert kernel == ArrayMetadata((8, 4), "bfloat16", "P('dp', None)")
    assert kernel.num_bytes == 64
    key = found.arrays["model"]["layers.1.rngs.key"]
    assert (key.shape, key.dtype, key.key) == ((2,), "uint32", "threefry2x32")
    assert (found.step, found.data_state, found.extra, found.metrics) == (
        10,
        {"epoch": 1},
        {"run": "a"},
        {"loss": 0.25},
    )
    assert (found.num_processes, found.num_devices) == (1, jax.device_count())


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("float32", 4), ("bfloat16", 2), ("bool", 1), ("float8_e4m3fn", 1), ("int4", 1), ("uint64", 8)],
)
def test_bytes_of_dtypes(dtype: str, num_bytes: int) -> None:
    assert ArrayMetadata((3,), dtype, "host").num_bytes == 3 * num_bytes


def test_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"does not have the checkpoint of step 11; it has those of the steps \[10, 20\]",
    ):
        metadata(folder, 11)
    with pytest.raises(CheckpointError, match="is no checkpoint of jaxpar"):
        metadata(folder)
    with pytest.raises(CheckpointError, match="cannot be read"):
        metadata(tmp_path / "nowhere")
    assert verify(folder, 10) == []


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(folder), "10"]) == 0
    assert "loss 0.25" in capsys.readouterr().out
    assert main(["show", str(folder), "10"]) == 0
    said = capsys.readouterr().out
    assert "layers.0.kernel" in said and "P('dp', None)" in said and "data_state {'epoch': 1}" in said
    assert main(["verify", str(folder), "10"]) == 0
    assert capsys.readouterr().out == "step 10: as it was written\n"
    assert main(["show", str(folder)]) == 2
    assert "is no checkpoint of jaxpar" in capsys.readouterr().err


def test_no_backend_starts(folder: Path) -> None:
    code = (
        "import sys; from jaxpar.checkpoint.__main__ import main; main(sys.argv[1:]);"
        "from jax._src import xla_bridge; assert not xla_bridge._backends"
    )
    subprocess.run(
        [sys.executable, "-c", code, "show", folder, "10"], check=True, timeout=120, stdout=subprocess.DEVNULL
    )
