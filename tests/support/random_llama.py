"""A random llama with awkward sizes, written as a Hugging Face directory."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, NUM_LAYERS, VOCAB, HEAD_DIM = 72, 101, 3, 131, 8


def write_random_llama(
    directory: Path, *, num_heads: int, num_kv_heads: int, tied: bool, biases: bool
) -> None:
    """Float32, 3 layers; vocabulary and intermediate size are primes."""
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "attention_bias": biases,
        "mlp_bias": biases,
        "dtype": "float32",
    }
    linears = {
        "self_attn.q_proj": (num_heads * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (num_kv_heads * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (num_kv_heads * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, num_heads * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(NUM_LAYERS):
        for name, shape in linears.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if biases:
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    generator = torch.Generator().manual_seed(5)
    save_file(
        {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(config))
