"""ModelConfig from a GGUF file's metadata and tensor directory."""

from collections import Counter
from typing import Any, Final

import numpy as np
from gguf.constants import GGMLQuantizationType

from aioengine.checkpoint.gguf_model import GGUFModel, model_name
from aioengine.model_config import Dtype, ModelConfig, RopeConfig, checked

ARCHITECTURE: Final = "llama"
PLAIN_DTYPES: Final[dict[GGMLQuantizationType, Dtype]] = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
QUANTISED_DTYPE: Final[Dtype] = "bfloat16"
END_TOKEN_KEYS: Final = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
"""End of sequence, of turn, of message: generation stops at each of them."""


def model_config_from_gguf(file: GGUFModel) -> ModelConfig:
    """Raises ValueError that names the file and the key for what is missing or not supported."""
    found = file.fields.get("general.architecture")
    if found != ARCHITECTURE:
        raise ValueError(
            f"{file.path}: architecture {found!r} is not supported; {ARCHITECTURE!r} is"
        )
    if _optional(file, "expert_count", 0):
        raise ValueError(f"{file.path}: mixtures of experts are not supported yet")
    num_heads = _positive(file, "attention.head_count")
    hidden_size = _positive(file, "embedding_length")
    head_dim = _head_dim(file, hidden_size // num_heads)
    config = ModelConfig(
        family="llama",
        name=model_name(file.path),
        hidden_size=hidden_size,
        intermediate_size=_positive(file, "feed_forward_length"),
        num_layers=_positive(file, "block_count"),
        num_heads=num_heads,
        num_kv_heads=_positive(file, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=file.tensor("token_embd.weight").shape[0],
        max_position=_positive(file, "context_length"),
        rms_norm_eps=_float(file, "attention.layer_norm_rms_epsilon"),
        rope=_rope(file, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        dtype=_dtype(file),
        eos_token_ids=tuple(
            dict.fromkeys(file.fields[key] for key in END_TOKEN_KEYS if key in file.fields)
        ),
        bos_token_id=file.fields.get("tokenizer.ggml.bos_token_id"),
    )
    return checked(config, str(file.path))


def _head_dim(file: GGUFModel, default: int) -> int:
    rotary_dim = _positive(file, "rope.dimension_count", default)
    head_dim = _positive(file, "attention.key_length", rotary_dim)
    if _positive(file, "attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{file.path}: values narrower or wider than keys are not supported")
    if rotary_dim != head_dim:
        raise ValueError(
            f"{file.path}: rotary embedding of {rotary_dim} of {head_dim} dimensions is not "
            "supported"
        )
    return head_dim


def _rope(file: GGUFModel, head_dim: int) -> RopeConfig:
    theta = _float(file, "rope.freq_base", 10000.0)
    has_factor = f"{ARCHITECTURE}.rope.scaling.factor" in file.fields
    kind = _optional(file, "rope.scaling.type", "linear" if has_factor else "none")
    if kind not in ("none", "linear"):
        raise ValueError(
            f"{file.path}: rope.scaling.type {kind!r} is not supported; none, linear are"
        )
    factor = _float(file, "rope.scaling.factor") if kind == "linear" else 1.0
    if "rope_freqs.weight" in file.tensors:
        factors = tuple(factor * each for each in _freq_factors(file, head_dim // 2))
        return RopeConfig(theta=theta, rope_type="freq_factors", freq_factors=factors)
    if kind == "linear":
        return RopeConfig(theta=theta, rope_type="linear", factor=factor)
    return RopeConfig(theta=theta)


def _freq_factors(file: GGUFModel, num_frequencies: int) -> list[float]:
    """Divisors of the frequencies: what the converter makes of Llama 3's rope scaling."""
    tensor = file.tensor("rope_freqs.weight")
    if tensor.type != GGMLQuantizationType.F32 or tensor.shape != (num_frequencies,):
        raise ValueError(
            f"{file.path}: rope_freqs.weight is {tensor.type.name} {list(tensor.shape)}, not F32 "
            f"[{num_frequencies}]"
        )
    packed = file.packed(tensor, slice(0, 1), slice(0, tensor.row_bytes))
    factors: list[float] = packed.view(np.float32)[0].tolist()
    return factors


def _dtype(file: GGUFModel) -> Dtype:
    """Of the type that most elements of the matrices have (norms are always float32)."""
    num_elements: Counter[GGMLQuantizationType] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            num_elements[tensor.type] += tensor.num_rows * tensor.shape[-1]
    return PLAIN_DTYPES.get(max(num_elements, key=num_elements.__getitem__), QUANTISED_DTYPE)


def _optional(file: GGUFModel, key: str, default: Any) -> Any:
    return file.fields.get(f"{ARCHITECTURE}.{key}", default)


def _positive(file: GGUFModel, key: str, default: int | None = None) -> int:
    """A count. A list (one number per layer) must hold one number only."""
    value = _optional(file, key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{file.path}: {ARCHITECTURE}.{key} must be a positive integer, found {value!r}"
        )
    return value


def _float(file: GGUFModel, key: str, default: float | None = None) -> float:
    value = _optional(file, key, default)
    if not isinstance(value, float):
        raise ValueError(f"{file.path}: {ARCHITECTURE}.{key} must be a number, found {value!r}")
    return value
