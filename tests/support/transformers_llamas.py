"""Random tiny llamas, written and computed by transformers."""

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "default": {"layers": 2, "heads": 9, "kv_heads": 3, "head_dim": 8, "vocab": 131, "mlp": 101},
    "linear-tied": {
        "layers": 5,
        "heads": 5,
        "kv_heads": 5,
        "head_dim": 6,
        "vocab": 97,
        "mlp": 33,
        "tied": True,
        "rope": {"rope_type": "linear", "factor": 2.5},
    },
    "llama3-biases": {
        "layers": 3,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 10,
        "vocab": 256,
        "mlp": 77,
        "biases": True,
        "rope": LLAMA3_ROPE,
    },
    "one-kv-head-tied-biases": {
        "layers": 4,
        "heads": 7,
        "kv_heads": 1,
        "head_dim": 16,
        "vocab": 50,
        "mlp": 1,
        "tied": True,
        "biases": True,
    },
    "llama3-tied-sharded": {
        "layers": 3,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 2,
        "vocab": 301,
        "mlp": 64,
        "tied": True,
        "rope": LLAMA3_ROPE | {"rope_theta": 5e5},
        "shard_size": "8KB",
    },
    "one-head": {"layers": 2, "heads": 1, "kv_heads": 1, "head_dim": 24, "vocab": 3, "mlp": 5},
}


def write_llama(directory: Path, shape: dict[str, Any], seed: int) -> LlamaForCausalLM:
    """Every parameter random, biases and norms too; float32. Returns what it wrote."""
    config = LlamaConfig(
        hidden_size=shape["heads"] * (shape["head_dim"] + 1),
        head_dim=shape["head_dim"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["mlp"],
        vocab_size=shape["vocab"],
        max_position_embeddings=64,
        tie_word_embeddings=shape.get("tied", False),
        attention_bias=shape.get("biases", False),
        mlp_bias=shape.get("biases", False),
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **shape.get("rope", {})},
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = name.endswith("norm.weight")
            parameter.copy_(1 + 0.3 * noise if is_norm else 0.2 * noise)
    model.save_pretrained(directory, max_shard_size=shape.get("shard_size", "1GB"))
    return model


@torch.inference_mode()
def reference_logits(model: LlamaForCausalLM, token_ids: list[int]) -> Tensor:
    """[len(token_ids), vocabulary], without a cache."""
    logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits
