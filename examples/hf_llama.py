"""Llama checkpoints of Hugging Face into the example transformer, and back.

    blocks.0.attention.qkv.kernel [D, K (G + 2) E]  =  q_proj.weight [K G E, D], k_proj.weight [K E, D], v_proj.weight [K E, D]
    blocks.0.mlp.gate.kernel      [D, F]            =  gate_proj.weight [F, D]
    embed.embedding               [V, D]            =  embed_tokens.weight [V, D]

Both turn the halves of a head by RoPE, so no column changes its place inside a head.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxpar.checkpoint import Tensors, load_safetensors, save_safetensors
from transformer import RopeScaling, Transformer, TransformerConfig

# What a Llama may say, and the only thing that this transformer computes.
ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
SCALING = {
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "length": "original_max_position_embeddings",
}
PLAIN = {
    "embed.embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "norm1.scale": "input_layernorm.weight",
    "norm2.scale": "post_attention_layernorm.weight",
}
TRANSPOSED = {
    "head.kernel": "lm_head.weight",
    "attention.out.kernel": "self_attn.o_proj.weight",
    "mlp.gate.kernel": "mlp.gate_proj.weight",
    "mlp.up.kernel": "mlp.up_proj.weight",
    "mlp.down.kernel": "mlp.down_proj.weight",
}


def load_llama(
    folder: str | Path,
    parallelize: Callable[[Transformer], object] = lambda model: None,
    *,
    dtype: DTypeLike = jnp.float32,
) -> Transformer:
    """A Llama that `save_pretrained` has written, as a `Transformer`; whole on no device that holds a part only.

    Args:
        folder: with config.json and safetensors files.
        parallelize: what `jaxpar.init_sharded` takes: shards the model, which has no values yet.
        dtype: what the layers compute in; parameters are float32.

    Raises:
        ValueError: it is no Llama that this transformer can compute.
    """
    config = config_from_hf(json.loads((Path(folder) / "config.json").read_text()), dtype=dtype)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    parallelize(model)
    load_safetensors(model, folder, names=llama_names(config), cast=True)
    return model


def save_llama(
    model: Transformer, folder: str | Path, *, dtype: DTypeLike = jnp.float32, max_length: int = 2048
) -> None:
    """Writes what `LlamaForCausalLM.from_pretrained(folder)` reads; all processes call it together.

    Args:
        model: in any layout.
        folder: made if it is not there.
        dtype: of the weights in the files.
        max_length: how long texts were in training, for those who read config.json.
    """
    save_safetensors(model, folder, names=llama_names(model.config), dtype=dtype)
    if jax.process_index() == 0:
        found = config_to_hf(model.config, dtype=dtype, max_length=max_length)
        (Path(folder) / "config.json").write_text(json.dumps(found, indent=2) + "\n")


def config_from_hf(found: Mapping[str, Any], *, dtype: DTypeLike = jnp.float32) -> TransformerConfig:
    """The sizes in a config.json.

    Raises:
        ValueError: it describes another model.
    """
    heads, width = found["num_attention_heads"], found["hidden_size"]
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    said = {name: found.get(name, value) for name, value in ONLY.items()}
    kind = rope.get("rope_type", rope.get("type", "default"))
    said |= {"model_type": found.get("model_type"), "rope_type": kind}
    said |= {"head_dim": found.get("head_dim") or width // heads}
    computed = {name: (value,) for name, value in ONLY.items()}
    computed |= {"model_type": ("llama",), "rope_type": ("default", "llama3"), "head_dim": (width // heads,)}
    wrong = [
        f"{name}={said[name]!r}, not {' or '.join(map(repr, values))}"
        for name, values in computed.items()
        if said[name] not in values
    ]
    if wrong:
        raise ValueError(f"examples/transformer.py does not compute this model: {'; '.join(wrong)}.")
    return TransformerConfig(
        vocab=found["vocab_size"],
        width=width,
        depth=found["num_hidden_layers"],
        heads=heads,
        kv_heads=found.get("num_key_value_heads") or heads,
        hidden=found["intermediate_size"],
        rope_base=rope.get("rope_theta", found.get("rope_theta", 10_000.0)),
        rope_scaling=RopeScaling(**{ours: rope[theirs] for ours, theirs in SCALING.items()})
        if kind == "llama3"
        else None,
        norm_eps=found.get("rms_norm_eps", 1e-6),
        tied=found.get("tie_word_embeddings", False),
        dtype=dtype,
    )


def config_to_hf(config: TransformerConfig, *, dtype: DTypeLike, max_length: int) -> dict[str, Any]:
    """The inverse: a config.json for transformers 4 and 5."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = dataclasses.asdict(config.rope_scaling)
        rope = {"rope_type": "llama3"} | {theirs: scaling[ours] for ours, theirs in SCALING.items()}
    return (
        ONLY
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": config.vocab,
            "hidden_size": config.width,
            "num_hidden_layers": config.depth,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_width,
            "intermediate_size": config.hidden,
            "max_position_embeddings": max_length,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_base,
            "rope_parameters": rope | {"rope_theta": config.rope_base},
            "tie_word_embeddings": config.tied,
            "dtype": str(jnp.dtype(dtype)),
            "torch_dtype": str(jnp.dtype(dtype)),
        }
        | ({} if config.rope_scaling is None else {"rope_scaling": rope})
    )  # transformers 4 knows no rope_parameters


def llama_names(config: TransformerConfig) -> Callable[[str], str | Tensors]:
    """What Hugging Face calls the arrays of a `Transformer`, and how it lays them out."""
    widths = (config.heads // config.kv_heads * config.head_width, config.head_width, config.head_width)

    def names(name: str) -> str | Tensors:
        layer, part = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.*)", name).groups()  # pyright: ignore[reportOptionalMemberAccess]
        prefix = "" if layer is None else f"model.layers.{layer}."
        if part in PLAIN:
            return prefix + PLAIN[part]
        if part in TRANSPOSED:
            return Tensors(prefix + TRANSPOSED[part], permute=(1, 0))
        assert part == "attention.qkv.kernel", name
        qkv = tuple(f"{prefix}self_attn.{letter}_proj.weight" for letter in "qkv")
        return Tensors(qkv, permute=(1, 0), widths=widths)

    return names
