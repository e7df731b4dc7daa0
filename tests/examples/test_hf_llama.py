"""Llama checkpoints: logits are those of transformers, from a stored checkpoint always, from the package if it is there."""

import dataclasses
import importlib.util
import json
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from hf_llama import config_from_hf, config_to_hf, load_llama, save_llama
from jaxpar.fsdp import fully_shard
from jaxpar.mesh import init_device_mesh
from jaxpar.tp import ColwiseParallel, RowwiseParallel, parallelize_module
from transformer import RopeScaling, Transformer, TransformerConfig

GOLDEN = Path(__file__).parent / "golden"
LLAMA3 = runpy.run_path(str(GOLDEN / "make.py"))["LLAMA3"]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "expected.safetensors")


def parallelize(model: Transformer) -> None:
    """Key/value heads over two devices, and what is left over two more."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    plan = {"blocks.*.attention.qkv": ColwiseParallel(), "blocks.*.attention.out": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh["dp"], units="blocks.*", pad_above_bytes=0)


def logits(model: Transformer, tokens: Any) -> np.ndarray:
    return np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens, jnp.int32)))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: x for path in folder.glob("model*.safetensors") for name, x in load_file(path).items()}


@pytest.mark.parametrize("layout", [lambda model: None, parallelize], ids=["one device", "dp=2 tp=2"])
def test_a_llama_has_the_logits_that_transformers_computed(
    layout: Any, expected: dict[str, np.ndarray], tmp_path: Path
) -> None:
    model = load_llama(GOLDEN, layout)
    assert (model.blocks[0].attention.qkv.kernel.sharding.num_devices == 4) == (layout is parallelize)
    np.testing.assert_allclose(logits(model, expected["tokens"]), expected["logits"], **CLOSE)
    save_llama(model, tmp_path)
    back, own = tensors(tmp_path), tensors(GOLDEN)
    assert back.keys() == own.keys()
    assert all(np.array_equal(back[name], x) and back[name].dtype == x.dtype for name, x in own.items())
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN, tmp_path))
    assert {name: theirs[name] for name in ours.keys() & theirs.keys()} == {
        name: ours[name] for name in ours.keys() & theirs.keys()
    }


def scaled_as(form: str) -> dict[str, Any]:
    """What config.json says of scaled positions, in transformers 5 and 4."""
    rope: dict[str, Any] = LLAMA3
    if form == "rope_parameters":
        return {form: rope}
    return {"rope_theta": rope["rope_theta"], "rope_parameters": None, form: rope}


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_positions_scaled_as_in_llama_3(form: str, tmp_path: Path) -> None:
    expected = load_file(GOLDEN / "expected_llama3.safetensors")
    for path in GOLDEN.glob("model*"):
        (tmp_path / path.name).symlink_to(path)
    found = json.loads((GOLDEN / "config.json").read_text()) | scaled_as(form)
    (tmp_path / "config.json").write_text(json.dumps(found))
    model = load_llama(tmp_path, parallelize)
    assert model.config.rope_scaling == RopeScaling(factor=4.0, low=1.0, high=4.0, length=24)
    np.testing.assert_allclose(logits(model, expected["tokens"]), expected["logits"], **CLOSE)
    graph, state = nnx.split(model)
    other = Transformer(dataclasses.replace(model.config, rope_scaling=None), rngs=nnx.Rngs(0))
    nnx.update(other, state)
    assert np.abs(logits(other, expected["tokens"]) - expected["logits"]).max() > 1e-2


def test_fast_pairs_stay_and_slow_ones_are_slowed_down() -> None:
    frequency = 5e5 ** (-np.arange(0, 128, 2) / 128)  # of Llama 3
    slower = frequency / np.asarray(RopeScaling()(jnp.asarray(frequency)))
    turns = frequency * 8192 / (2 * np.pi)
    np.testing.assert_allclose(slower[turns > 4], 1, rtol=1e-6)
    np.testing.assert_allclose(slower[turns < 1], 8, rtol=1e-6)
    between = slower[(turns > 1) & (turns < 4)]
    assert len(between) > 3 and (np.diff(between) > 0).all() and 1 < between[0] and between[-1] < 8


def test_every_part_of_the_stored_llama_matters(expected: dict[str, np.ndarray]) -> None:
    """Or equal logits would prove nothing: a wrong order of columns, eps or base of RoPE is seen."""
    model = load_llama(GOLDEN)
    graph, state = nnx.split(model)
    for change in ({"norm_eps": 1e-2}, {"rope_base": 10_000.0}):
        other = Transformer(dataclasses.replace(model.config, **change), rngs=nnx.Rngs(0))
        nnx.update(other, state)
        assert np.abs(logits(other, expected["tokens"]) - expected["logits"]).max() > 1e-2
    kernel = model.blocks[1].attention.qkv.kernel
    kernel.set_value(kernel[...].reshape(16, 2, 4, 4)[:, :, [1, 0, 2, 3]].reshape(16, 32))
    assert np.abs(logits(model, expected["tokens"]) - expected["logits"]).max() > 1e-2


@pytest.mark.parametrize(
    "config",
    [
        TransformerConfig(rope_base=5e5, norm_eps=1e-5, tied=True),
        TransformerConfig(rope_base=5e5, rope_scaling=RopeScaling(factor=32.0)),
        TransformerConfig(vocab=100, width=64, depth=1, heads=8, kv_heads=8, hidden=7, dtype=jnp.bfloat16),
    ],
)
def test_configurations_come_back(config: TransformerConfig) -> None:
    found = json.loads(json.dumps(config_to_hf(config, dtype=jnp.float32, max_length=512)))
    assert config_from_hf(found, dtype=config.dtype) == config
    old = {"rope_scaling": None} | {name: x for name, x in found.items() if name != "rope_parameters"}
    assert config_from_hf(old, dtype=config.dtype) == config  # as transformers 4 writes it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True, not False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', not 'silu'"),
        ({"head_dim": 64, "model_type": "mistral"}, "model_type='mistral', not 'llama'; head_dim=64, not 4"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn', not 'default' or 'llama3'"),
    ],
)
def test_models_that_the_transformer_does_not_compute_are_refused(change: dict, message: str) -> None:
    found = json.loads((GOLDEN / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        config_from_hf(found | change)


needs_transformers = pytest.mark.skipif(
    not (importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")),
    reason="transformers and torch are not installed: pip install 'jaxpar[bench]'",
)


@needs_transformers
@pytest.mark.parametrize(
    ("tied", "num_kv_heads", "scaling"), [(False, 2, RopeScaling(factor=4.0, length=16)), (True, 1, None)]
)
def test_llamas_go_to_transformers_and_back(
    tied: bool, num_kv_heads: int, scaling: RopeScaling | None, tmp_path: Path
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = np.random.default_rng(0).integers(0, 40, (2, 9))

    def theirs(model: LlamaForCausalLM) -> np.ndarray:
        with torch.no_grad():
            return model.eval()(torch.from_numpy(tokens)).logits.float().numpy()

    config = TransformerConfig(
        vocab=40,
        width=32,
        depth=2,
        heads=4,
        kv_heads=num_kv_heads,
        hidden=40,
        rope_scaling=scaling,
        norm_eps=1e-5,
        tied=tied,
    )
    ours = Transformer(config, rngs=nnx.Rngs(0))
    layout = parallelize if num_kv_heads % 2 == 0 else lambda model: None
    layout(ours)
    save_llama(ours, tmp_path / "ours")
    np.testing.assert_allclose(
        theirs(LlamaForCausalLM.from_pretrained(tmp_path / "ours")), logits(ours, tokens), **CLOSE
    )

    torch.manual_seed(1)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": num_kv_heads, "tie_word_embeddings": tied}
    made = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2)).to(torch.bfloat16)
    made.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    made = LlamaForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    loaded = load_llama(tmp_path / "theirs", layout)
    np.testing.assert_allclose(logits(loaded, tokens), theirs(made), **CLOSE)
