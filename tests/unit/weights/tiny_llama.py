"""A random llama of two layers, as Hugging Face tensors and written as safetensors or GGUF."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray
from torch import Tensor

HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 40, 8, 4, 32
GGUF_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SCALES_AT: Final = {
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
    GGMLQuantizationType.IQ4_NL: (0,),
}
"""Bytes of a block where its float16 scales begin."""
SHAPES: Final = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}


def random_tensors(tied: bool = True) -> dict[str, Tensor]:
    """Under their Hugging Face names, float32."""
    generator = torch.Generator().manual_seed(1)
    shapes = {
        f"model.layers.{layer}.{part}.weight": shape
        for layer in range(2)
        for part, shape in SHAPES.items()
    }
    shapes["model.embed_tokens.weight"] = (VOCAB, HIDDEN)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    top_level = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top_level:
        return top_level[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part.removesuffix('.weight')]}.weight"


def interleave_heads(tensor: Tensor) -> Tensor:
    """What GGUF conversion does to q and k: row i and row i + head_dim / 2 become neighbours."""
    heads = tensor.reshape(-1, HEAD_DIM, *tensor.shape[1:])
    order = [half * HEAD_DIM // 2 + i for i in range(HEAD_DIM // 2) for half in (0, 1)]
    return heads[:, order].reshape(tensor.shape)


def packed_matrix(
    kind: GGMLQuantizationType, shape: tuple[int, int], rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Rows as they lie in a file. Where the library cannot quantise: any bits, sane scales."""
    try:
        packed = quantize(rng.standard_normal(shape, dtype=np.float32), kind)
        return packed.view(np.uint8)
    except NotImplementedError:
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        blocks = rng.integers(
            0, 256, (shape[0], shape[1] // block_size, block_bytes), dtype=np.uint8
        )
        for at in SCALES_AT[kind]:
            scales = rng.uniform(0.01, 0.02, blocks.shape[:2]).astype(np.float16)
            blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
        return blocks.reshape(shape[0], -1)


def halves_of_heads(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Undoes `interleave_heads`: even rows of a head first, then the odd ones."""
    order = [*range(0, HEAD_DIM, 2), *range(1, HEAD_DIM, 2)]
    return values.reshape(-1, HEAD_DIM, values.shape[-1])[:, order].reshape(values.shape)


def write_gguf(
    path: Path,
    tensors: dict[str, Tensor],
    kind: GGMLQuantizationType,
    extra: Mapping[str, NDArray[np.uint8]] = MappingProxyType({}),
    tensors_per_part: int = 0,
) -> None:
    """Matrices become `kind`, vectors stay float32. `extra`: packed bytes under GGUF names.

    With `tensors_per_part` several files, whose names follow from `path`.
    """
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors_per_part)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, tensor in tensors.items():
        stored = interleave_heads(tensor) if ".q_proj." in name or ".k_proj." in name else tensor
        if tensor.dim() == 1:
            writer.add_tensor(gguf_name(name), stored.numpy())
        else:
            packed = quantize(stored.contiguous().numpy(), kind)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
    for name, packed in extra.items():
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.add_tensor("rope_freqs.weight", np.ones(HEAD_DIM // 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
