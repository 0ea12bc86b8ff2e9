"""ModelConfig from the JSON of a Hugging Face directory."""

from typing import Any

import pytest

from aioengine.model_config import DefaultSampling, RopeConfig, model_config_from_hf

MINIMAL = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
LLAMA3_ROPE = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_every_key_is_read() -> None:
    full = MINIMAL | {
        "head_dim": 80,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = model_config_from_hf(full, {}, "SmolLM2")
    assert (config.family, config.name) == ("llama", "SmolLM2")
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (576, 1536, 30)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 80)
    assert (config.vocab_size, config.max_position, config.rms_norm_eps) == (49152, 8192, 1e-5)
    assert config.rope == RopeConfig(theta=100000)
    assert (config.attention_bias, config.attention_out_bias, config.mlp_bias) == (True,) * 3
    assert (config.tie_word_embeddings, config.dtype) == (True, "bfloat16")
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_what_is_missing_takes_the_format_s_defaults() -> None:
    config = model_config_from_hf(
        {key: value for key, value in MINIMAL.items() if key != "num_key_value_heads"}, {}, "m"
    )
    assert (config.num_kv_heads, config.head_dim) == (9, 64)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False,) * 3
    assert (config.dtype, config.max_position) == ("float32", 2048)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (2, {}, (2,)),
        ([2, 3], {}, (2, 3)),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"eos_token_id": 0}, (0,)),
    ],
)
def test_end_tokens_of_the_generation_config_win(
    config_eos: Any, generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    config = model_config_from_hf(MINIMAL | {"eos_token_id": config_eos}, generation, "m")
    assert config.eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, DefaultSampling()),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_new_tokens": 5},
            DefaultSampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1),
        ),
        ({"do_sample": True, "temperature": 1}, DefaultSampling(temperature=1.0)),
        (
            {"do_sample": False, "temperature": 0.6, "top_k": 5, "repetition_penalty": 1.05},
            DefaultSampling(repetition_penalty=1.05),
        ),
        ({"top_k": None, "do_sample": None}, DefaultSampling()),
    ],
)
def test_default_sampling(generation: dict[str, Any], expected: DefaultSampling) -> None:
    assert model_config_from_hf(MINIMAL, generation, "m").default_sampling == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1.0),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("top_k", 1.5),
        ("min_p", 2.0),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", "all"),
        ("max_new_tokens", True),
    ],
)
def test_defaults_that_make_no_sense(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"generation_config\.json: .*{key}"):
        model_config_from_hf(MINIMAL, {key: value}, "m")


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, None),
        ({"max_new_tokens": None}, None),
        ({"max_new_tokens": 5}, 5),
        ({"max_new_tokens": 5, "do_sample": False}, 5),
        ({"max_length": 20}, None),
    ],
)
def test_default_max_tokens(generation: dict[str, Any], expected: int | None) -> None:
    assert model_config_from_hf(MINIMAL, generation, "m").default_max_tokens == expected


def test_dtype_has_an_old_and_a_new_spelling() -> None:
    both = MINIMAL | {"dtype": "float16", "torch_dtype": "bfloat16"}
    assert model_config_from_hf(both, {}, "m").dtype == "float16"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, RopeConfig(theta=10000.0)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(theta=5e5)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeConfig(rope_type="linear", factor=2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE | {"rope_type": "llama3"}},
            RopeConfig(theta=5e5, rope_type="llama3", factor=32.0, original_max_position=8192),
        ),
        (
            {"rope_parameters": LLAMA3_ROPE | {"rope_type": "llama3", "rope_theta": 5e5}},
            RopeConfig(theta=5e5, rope_type="llama3", factor=32.0, original_max_position=8192),
        ),
    ],
)
def test_rope_has_an_old_and_a_new_spelling(keys: dict[str, Any], expected: RopeConfig) -> None:
    assert model_config_from_hf(MINIMAL | keys, {}, "m").rope == expected


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, found None"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, found 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs a factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype"),
        ({"max_position_embeddings": 0}, "max_position"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_key_value_heads": [3]}, "num_kv_heads"),
        ({"eos_token_id": "</s>"}, "eos_token_ids"),
    ],
)
def test_what_is_wrong_or_not_supported_is_named(keys: dict[str, Any], shown: str) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: ") as caught:
        model_config_from_hf(MINIMAL | keys, {}, "m")
    assert shown in str(caught.value)
