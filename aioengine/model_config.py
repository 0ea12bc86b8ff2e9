"""ModelConfig: the facts about a model that layout, scheduler and layers need. Pure data."""

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Dtype = Literal["float32", "bfloat16", "float16"]
RopeType = Literal["default", "linear", "llama3", "freq_factors"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding. `factor` and what follows apply to scaled types only."""

    theta: float = 10000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    freq_factors: tuple[float, ...] = ()
    """Of type freq_factors, GGUF's form of llama3: head_dim / 2 divisors, one per frequency."""


class DefaultSampling(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's author chose for requests that leave a field out. None: nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer. `family` selects the code in `models/registry.py`."""

    family: str
    name: str
    """For people: the directory's or the GGUF's own name."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: Annotated[int, Meta(ge=1)]
    head_dim: Annotated[int, Meta(ge=2, multiple_of=2)]
    """Even: the rotary embedding turns pairs."""
    vocab_size: int
    max_position: Annotated[int, Meta(ge=1)]
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool = False
    """Biases on q, k, v (and on o, when `attention_out_bias`)."""
    attention_out_bias: bool = False
    mlp_bias: bool = False
    dtype: Dtype = "float32"
    """torch's name of the type that `--dtype auto` stands for."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    default_sampling: DefaultSampling = DefaultSampling()
    default_max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Of an answer for which a request gives no number: what the model's author chose."""


def checked(config: ModelConfig, file: str) -> ModelConfig:
    """The same, with every value of its declared type and bounds; else ValueError naming `file`."""
    try:
        return msgspec.convert(msgspec.to_builtins(config), ModelConfig)
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from None


def model_config_from_hf(
    config: dict[str, Any], generation_config: dict[str, Any], name: str
) -> ModelConfig:
    """From the JSON objects of config.json and generation_config.json of a Hugging Face directory.

    Raises ValueError that names the key for what is missing or not supported.
    """
    family = config.get("model_type")
    if family != "llama":
        raise ValueError(f"config.json: model_type {family!r} is not supported; 'llama' is")
    if config.get("quantization_config"):
        raise ValueError("config.json: checkpoints with a quantization_config are not supported")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"config.json: hidden_act {activation!r} is not supported; 'silu' is")

    def need(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json: {key} must be a positive integer, found {value!r}")
        return value

    num_heads, hidden_size = need("num_attention_heads"), need("hidden_size")
    attention_bias = bool(config.get("attention_bias", False))
    read = ModelConfig(
        family=family,
        name=name,
        hidden_size=hidden_size,
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        vocab_size=need("vocab_size"),
        max_position=config.get("max_position_embeddings", 2048),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=_rope_from_hf(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        eos_token_ids=_token_ids(generation_config.get("eos_token_id", config.get("eos_token_id"))),
        bos_token_id=config.get("bos_token_id"),
        default_sampling=_default_sampling(generation_config),
        default_max_tokens=_default_max_tokens(generation_config),
    )
    return checked(read, "config.json")


def _default_sampling(generation_config: dict[str, Any]) -> DefaultSampling:
    """With an explicit `do_sample: false` what chooses among tokens does not count: the author
    meant greedy decoding, and a temperature beside it is a leftover. Without the key it counts."""
    fields = DefaultSampling.__struct_fields__
    if generation_config.get("do_sample") is False:
        fields = ("repetition_penalty",)
    found = {name: generation_config[name] for name in fields if name in generation_config}
    try:
        sampling = msgspec.convert(found, DefaultSampling)
    except msgspec.ValidationError as error:
        raise ValueError(f"generation_config.json: {error}") from None
    bounds = {
        "temperature": (0, math.inf),
        "top_p": (math.ulp(0), 1),
        "top_k": (-1, math.inf),
        "min_p": (0, 1),
        "repetition_penalty": (0.01, 100),
    }
    for name, (least, most) in bounds.items():
        value = getattr(sampling, name)
        if value is not None and not (least <= value <= most and value < math.inf):
            raise ValueError(f"generation_config.json: {name} {value} is out of range")
    return sampling


def _default_max_tokens(generation_config: dict[str, Any]) -> int | None:
    number = generation_config.get("max_new_tokens")
    if number is not None and (type(number) is not int or number < 1):
        raise ValueError(
            f"generation_config.json: max_new_tokens must be a positive integer, found {number!r}"
        )
    return number


def _rope_from_hf(config: dict[str, Any]) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_scaling` + `rope_theta`."""
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = table.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(
            f"config.json: rope type {kind!r} is not supported; default, linear, llama3 are"
        )
    if table.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("config.json: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return RopeConfig(theta=theta)
    if "factor" not in table:
        raise ValueError(f"config.json: rope type {kind!r} needs a factor")
    if kind == "linear":
        return RopeConfig(theta=theta, rope_type="linear", factor=table["factor"])
    return RopeConfig(
        theta=theta,
        rope_type="llama3",
        factor=table["factor"],
        low_freq_factor=table["low_freq_factor"],
        high_freq_factor=table["high_freq_factor"],
        original_max_position=table["original_max_position_embeddings"],
    )


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
