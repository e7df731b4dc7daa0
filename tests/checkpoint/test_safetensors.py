"""Weights as safetensors files: from every layout into every layout, exactly; read by others; streamed; atomic."""

import json
import os
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
import rig

from jaxpar.checkpoint import CheckpointError, Tensors, load_safetensors, save_safetensors
from jaxpar.checkpoint._safetensors_read import TensorFiles
from jaxpar.fsdp import full_state, fully_shard
from jaxpar.mesh import init_device_mesh

INDEX = "model.safetensors.index.json"


class Mixed(nnx.Module):
    """One of each: what divides by nothing, a scalar, other dtypes, statistics, keys, a tie, fused columns."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(params=seed, dropout=seed)
        self.fused = nnx.Linear(8, 12, rngs=rngs)
        self.odd = nnx.Param(jax.random.normal(rngs.params(), (5, 3)))
        self.gate = nnx.Param(jnp.float32(seed + 0.5))
        self.half = nnx.Param(jax.random.normal(rngs.params(), (3, 5), jnp.bfloat16))
        self.table = nnx.Param(jax.random.randint(rngs.params(), (8,), 0, 99))
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.norm.mean[...] += seed
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.tied = self.odd

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fused(x) * self.gate[...]


# Two turns of 3 + 2 + 1 columns; transposed, too.
NAMES = {
    "fused.kernel": Tensors(("q.weight", "k.weight", "v.weight"), permute=(1, 0), widths=(3, 2, 1)),
    "fused.bias": Tensors(("q.bias", "k.bias", "v.bias"), widths=(3, 2, 1), dim=0),
    "odd": Tensors("odd.weight", permute=(1, 0)),
    "table": None,
}


def mixed(num_devices: int, seed: int = 0, *, split_columns: bool = False) -> Mixed:
    model = Mixed(seed)
    mesh = init_device_mesh((num_devices,), ("dp",), devices=jax.devices()[:num_devices])
    if split_columns:  # parts whose edges are inside of a turn
        kernel = model.fused.kernel
        kernel.set_value(jax.device_put(kernel[...], NamedSharding(mesh.jax_mesh, P(None, "dp"))))
        return model
    return fully_shard(model, mesh, pad_above_bytes=0)


def weights(model: nnx.Module) -> dict[str, np.ndarray]:
    return {name: x for name, x in full_state(model).items() if "rngs" not in name}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From four devices, with names of others, in several files."""
    folder = tmp_path_factory.mktemp("export")
    save_safetensors(mixed(4), folder, names=NAMES, max_shard_bytes=200)
    return folder


# What is in the files.


def test_files_are_laid_out_as_hugging_faces(saved: Path) -> None:
    index = json.loads((saved / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert {path.name for path in saved.iterdir()} == {INDEX, *shards}
    assert shards == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    tensors = {name: (x, shard) for shard in shards for name, x in load_file(saved / shard).items()}
    assert {name: shard for name, (_, shard) in tensors.items()} == index["weight_map"]
    assert index["metadata"] == {"total_size": sum(x.nbytes for x, _ in tensors.values())}
    assert all(sum(x.nbytes for x, s in tensors.values() if s == shard) <= 200 for shard in shards)


def test_tensors_are_the_models_own_transposed_and_taken_apart(saved: Path) -> None:
    found = {name: x for path in saved.glob("*.safetensors") for name, x in load_file(path).items()}
    own = weights(Mixed(0))
    columns = {"q": [0, 1, 2, 6, 7, 8], "k": [3, 4, 9, 10], "v": [5, 11]}
    expected = {f"{name}.weight": own["fused.kernel"][:, at].T for name, at in columns.items()}
    expected |= {f"{name}.bias": own["fused.bias"][at] for name, at in columns.items()}
    expected |= {"odd.weight": own["odd"].T, "gate": own["gate"], "half": own["half"]}
    expected |= {f"norm.{name}": own[f"norm.{name}"] for name in ("bias", "mean", "scale", "var")}
    assert_same({name: found[name] for name in expected}, expected)
    assert found.keys() == expected.keys()


def test_a_small_export_is_one_file_and_dtypes_can_be_chosen(tmp_path: Path) -> None:
    save_safetensors(mixed(2), tmp_path / "new" / "folder", dtype=jnp.bfloat16)
    (file,) = (tmp_path / "new" / "folder").iterdir()
    found, own = load_file(file), weights(Mixed(0))
    expected = {name: x if x.dtype == np.int32 else x.astype(jnp.bfloat16) for name, x in own.items()}
    assert_same(found, expected)
    with pytest.raises(CheckpointError, match=re.escape("gate: dtype bfloat16 in the files, float32 here")):
        load_safetensors(mixed(2), file)
    model = mixed(2, seed=1)
    assert load_safetensors(model, file, cast=True) == ()
    assert_same(weights(model), {name: x.astype(own[name].dtype) for name, x in expected.items()})


# Into every layout.


@pytest.mark.parametrize("split_columns", [False, True])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_weights_load_into_every_number_of_devices(
    saved: Path, num_devices: int, split_columns: bool
) -> None:
    model, other = mixed(num_devices, seed=1, split_columns=split_columns), Mixed(1)
    places = [x.sharding for x in jax.tree.leaves(nnx.state(model))]
    before = weights(model)
    assert load_safetensors(model, saved, names=NAMES) == ()
    assert_same(weights(model), weights(Mixed(0)) | {"table": before["table"]})
    assert [x.sharding for x in jax.tree.leaves(nnx.state(model))] == places
    assert load_safetensors(other, saved, names=NAMES) == ()
    assert_same(weights(other), weights(model))
    assert not other.gate.get_value().committed  # or it could not meet sharded arrays outside jit


@pytest.mark.parametrize("layout", rig.SIZES)
def test_weights_go_from_every_layout_into_every_other(layout: str, tmp_path: Path) -> None:
    expected = weights(rig.Model(rngs=nnx.Rngs(0)))
    save_safetensors(rig.run(layout).model, tmp_path)
    assert_same(load_file(tmp_path / "model.safetensors"), expected)
    model = rig.run(layout, seed=1).model
    assert load_safetensors(model, tmp_path) == ()
    assert_same(weights(model), expected)


def test_an_abstract_model_is_filled_where_its_shardings_say(saved: Path) -> None:
    model = nnx.eval_shape(lambda: Mixed(1))
    fully_shard(model, init_device_mesh((8,), ("dp",)), pad_above_bytes=0)
    assert load_safetensors(model, saved, names=NAMES) == ()
    assert model.fused.kernel.sharding.num_devices == 8
    np.testing.assert_array_equal(model.fused.kernel[...], Mixed(0).fused.kernel[...])


def test_no_device_reads_what_it_does_not_hold(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 devices, of which this process is made to look as if it had two: a quarter of each split array is read."""
    elements: dict[str, int] = {}
    read = TensorFiles.read

    def counted(self: TensorFiles, name: str, index: Any) -> np.ndarray:
        found = read(self, name, index)
        elements[name] = elements.get(name, 0) + found.size
        return found

    monkeypatch.setattr(TensorFiles, "read", counted)
    model = mixed(8, split_columns=False)
    monkeypatch.setattr(
        jax,
        "make_array_from_callback",
        lambda shape, sharding, part: jax.make_array_from_single_device_arrays(
            shape,
            sharding,
            [
                jax.device_put(part(index) if i < 2 else np.zeros(sharding.shard_shape(shape), np.float32), d)
                for i, (d, index) in enumerate(sharding.devices_indices_map(shape).items())
            ],
        ),
    )
    only = {name: None for name in weights(model) if name not in ("fused.kernel", "odd")} | {
        name: NAMES[name] for name in ("fused.kernel", "odd")
    }
    assert load_safetensors(model, saved, names=only, strict=False) == ()
    assert sum(elements[f"{name}.weight"] for name in "qkv") == 8 * 12 // 4
    assert (
        elements["odd.weight"] == 3 + 6
    )  # 0:2 of 16 padded elements are in the first row of three, 2:4 in two


# Memory and disk.


def test_host_memory_is_one_array_and_the_budget(tmp_path: Path) -> None:
    """24 arrays of 512 KiB, transposed and cast: far less than all of them is in memory at once, writing and reading."""
    one, num = 1 << 19, 24
    mesh = init_device_mesh((2,), ("dp",), devices=jax.devices()[:2]).jax_mesh
    place = NamedSharding(mesh, P("dp"))
    values = [np.full((256, 512), i, np.float32) for i in range(num)]
    model = nnx.List([nnx.Param(jax.device_put(x, place)) for x in values])

    def names(name: str) -> Tensors:
        return Tensors(name, permute=(1, 0))

    tracemalloc.start()
    save_safetensors(
        model, tmp_path, names=names, dtype=jnp.bfloat16, max_shard_bytes=4 * one, budget_bytes=one // 4
    )
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tracemalloc.start()
    load_safetensors(model, tmp_path, names=names, cast=True)
    # XLA:CPU may take NumPy's memory for the model's own: that is there afterwards, too.
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(list(tmp_path.glob("*.safetensors"))) == num * one // 2 // (4 * one)
    assert written < 3 * one, written / one
    assert peak - after < 3 * one, (peak - after) / one
    assert [float(x[0, 0]) for x in model] == list(range(num))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_that_fails_leaves_the_one_before_it(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_safetensors(mixed(2), tmp_path, max_shard_bytes=200)
    before, synced = files_of(tmp_path), []

    def full(handle: int) -> None:
        synced.append(handle)
        if len(synced) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="could not be written .*No space left.*as it was"):
        save_safetensors(mixed(2, seed=1), tmp_path, max_shard_bytes=200)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("sizes", [(200, 10**6), (10**6, 200), (200, 100), (200, 200)])
def test_an_export_takes_the_place_of_the_one_before_it_and_never_mixes(
    sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every rename and removal a reader finds the old weights, the new ones, or an error; at the end the new ones."""
    save_safetensors(mixed(1), tmp_path, max_shard_bytes=sizes[0])
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00099.safetensors.tmp").write_text("of an export that was killed")
    seen: list[Any] = []
    expected = [weights(Mixed(seed)) for seed in (0, 1)]

    def look() -> None:
        model = Mixed(2)
        try:
            load_safetensors(model, tmp_path)
        except CheckpointError as error:
            assert "there is neither" in str(error)
            return seen.append(None)
        which = [int(np.array_equal(weights(model)["odd"], x["odd"])) for x in expected]
        assert_same(weights(model), expected[which.index(1)])
        seen.append(which.index(1))

    for name in ("rename", "unlink"):
        change = getattr(Path, name)

        def then_look(self: Path, *args: Any, change: Any = change, **kwargs: Any) -> Any:
            found = change(self, *args, **kwargs)
            look()
            return found

        monkeypatch.setattr(Path, name, then_look)
    save_safetensors(mixed(1, seed=1), tmp_path, max_shard_bytes=sizes[1])
    assert seen[-1] == 1 and seen == sorted(seen, key=lambda x: [0, None, 1].index(x))
    monkeypatch.undo()
    single = sizes[1] == 10**6
    names = {path.name for path in tmp_path.iterdir()}
    assert "config.json" in names and (INDEX in names) != single and ("model.safetensors" in names) == single
    assert not [name for name in names if name.endswith(".tmp")]
    num = len([name for name in names if name.startswith("model-")])
    assert single or {f"model-{i:05}-of-{num:05}.safetensors" for i in range(1, num + 1)} <= names


# Mistakes.


def test_all_that_does_not_fit_is_named_at_once_and_nothing_is_loaded(tmp_path: Path) -> None:
    found = weights(Mixed(0)) | {"stranger": np.zeros(2, np.float32), "odd": np.zeros(15, np.float32)}
    found |= {"half": np.zeros((3, 5), np.float32), "gate": np.zeros((), np.int32)}
    del found["fused.bias"]
    save_file({name: np.ascontiguousarray(x).reshape(x.shape) for name, x in found.items()}, tmp_path / "a")
    model = mixed(2, seed=1)
    before = weights(model)
    text = (
        "do not fit FSDPMixed; nothing was loaded:\n"
        "    fused.bias: missing from the files (float32[12])\n"
        "    gate: dtype int32 in the files, float32 here\n"
        "    odd: shape [15] in the files, [5, 3] expected\n"
        "    stranger: unexpected, no variable is made of it\n"
    )
    with pytest.raises(CheckpointError, match=re.escape(text)):
        load_safetensors(model, tmp_path / "a", cast=True)
    with pytest.raises(CheckpointError, match="3 tensors of"):
        load_safetensors(model, tmp_path / "a", strict=False)
    assert_same(weights(model), before)
    rest = {"odd": None, "gate": None, "half": None}
    assert load_safetensors(model, tmp_path / "a", names=rest, strict=False) == ("fused.bias",)


def test_files_that_are_missing_or_damaged_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is neither"):
        load_safetensors(mixed(1), tmp_path)
    for name, text in files_of(saved).items():
        (tmp_path / name).write_bytes(text)
    first = tmp_path / sorted(files_of(saved))[0]
    text = first.read_bytes()
    first.write_bytes(text[:-3])
    with pytest.raises(CheckpointError, match=f"{first.name} is missing, cut short or no safetensors"):
        load_safetensors(mixed(1), tmp_path, names=NAMES)
    first.unlink()
    with pytest.raises(CheckpointError, match=f"{first.name} is missing"):
        load_safetensors(mixed(1), tmp_path, names=NAMES)
    save_file({"other": np.zeros(1)}, first)
    with pytest.raises(CheckpointError, match=r"lists \d+ tensors that its files do not hold, first"):
        load_safetensors(mixed(1), tmp_path, names=NAMES)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match=r"index.json cannot be read"):
        load_safetensors(mixed(1), tmp_path, names=NAMES)


def test_without_the_package_the_extra_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match=re.escape("pip install 'jaxpar[hf]'")):
        load_safetensors(mixed(1), saved, names=NAMES)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tensors(("a", "b")), "2 tensors and 0 widths"),
        (lambda: Tensors(("a", "a"), widths=(1, 1)), "need different names"),
        (lambda: Tensors(("a", "b"), widths=(1, 0)), "widths are at least 1"),
        (lambda: Tensors("a", permute=(1, 1)), "does not name each dim once"),
        (lambda: Tensors("a", permute=(1, 0)).shapes((3,)), r"is not for an array of shape \[3\]"),
        (lambda: Tensors(("a", "b"), widths=(1, 1), dim=2).shapes((4, 4)), "dim=2 is no dim of an array"),
        (lambda: Tensors(("a", "b"), widths=(2, 1)).shapes((4, 4)), r"is not a multiple of 2 \+ 1 = 3"),
    ],
)
def test_rules_that_fit_nothing_are_named(make: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        make()


def test_models_and_options_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    model = Mixed(0)
    with pytest.raises(CheckpointError, match="gate and odd would both be written as 'odd'"):
        save_safetensors(model, tmp_path, names={"gate": "odd"})
    with pytest.raises(CheckpointError, match="max_shard_bytes=0 holds nothing"):
        save_safetensors(model, tmp_path, max_shard_bytes=0)
    with pytest.raises(CheckpointError, match="save_safetensors: budget_bytes=0 lets nothing through"):
        save_safetensors(model, tmp_path, budget_bytes=0)
    with pytest.raises(CheckpointError, match="have shapes but no values.*or fill it with load_safetensors"):
        save_safetensors(nnx.eval_shape(lambda: Mixed(0)), tmp_path)
    model.gate.set_value(jnp.ones(2, jnp.float8_e4m3fn))
    with pytest.raises(CheckpointError, match="gate is float8_e4m3fn, which is not written"):
        save_safetensors(model, tmp_path)
    assert not list(tmp_path.iterdir())
