"""Makes the tiny Llama checkpoint of this folder with transformers: `python tests/examples/golden/make.py`.

    config.json, model-0000i-of-0000n.safetensors, model.safetensors.index.json     as `save_pretrained` writes them
    expected.safetensors                                                            tokens i64[2, 12], logits f32[2, 12, V]
    expected_llama3.safetensors                                                     the same weights, positions scaled as `LLAMA3`

Random weights, two blocks, four query heads on two key/value heads; the values are large, so that every part matters.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
# Of the two pairs of a head one turns often enough in 24 tokens to stay nearly as it is, and the other is slowed down.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 30.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}


def main() -> None:
    """Writes the files beside this one."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones otherwise, which hide a norm in the wrong place
                parameter.uniform_(0.5, 1.5)
        tokens = torch.randint(0, 48, (2, 12))
        logits = model(tokens).logits
    model.save_pretrained(FOLDER, max_shard_size="12KB")
    (FOLDER / "generation_config.json").unlink(missing_ok=True)
    save_file({"tokens": tokens, "logits": logits.contiguous()}, FOLDER / "expected.safetensors")
    config = LlamaConfig.from_pretrained(FOLDER, rope_parameters=LLAMA3)
    model = LlamaForCausalLM.from_pretrained(FOLDER, config=config).eval()
    with torch.no_grad():
        logits = model(tokens).logits
    save_file({"tokens": tokens, "logits": logits.contiguous()}, FOLDER / "expected_llama3.safetensors")


if __name__ == "__main__":
    main()
