from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from aioengine.checkpoint.gguf_file import GGUFFile
from aioengine.checkpoint.gguf_metadata import model_config_from_gguf
from aioengine.checkpoint.gguf_model import GGUFModel
from aioengine.errors import StartupError
from aioengine.model_config import ModelConfig, RopeConfig

Q8_0 = GGMLQuantizationType.Q8_0
FACTORS = (1.0, 2.0, 4.0, 8.5) * 2
TINY: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def write(
    path: Path,
    settings: dict[str, Any],
    arch: str = "llama",
    tensors: Mapping[str, NDArray[Any]] | None = None,
) -> GGUFFile:
    writer = gguf.GGUFWriter(path, arch)
    for name, value in settings.items():
        key = name if name.startswith("tokenizer.") else f"llama.{name}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    if tensors is None:
        tensors = {"token_embd.weight": np.zeros((32, 64), np.float32)}
    for name, tensor in tensors.items():
        raw_dtype = Q8_0 if tensor.dtype == np.uint8 else None
        writer.add_tensor(name, tensor, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def config_of(file: GGUFFile) -> ModelConfig:
    return model_config_from_gguf(GGUFModel(file.path))


def test_values_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "kinds.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_bool("a", True)
    writer.add_int8("b", -3)
    writer.add_uint64("c", 2**63)
    writer.add_float64("d", 0.1)
    writer.add_array("e", ["x", "日本"])
    writer.add_array("f", [1, -2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = GGUFFile(path).fields
    library = gguf.GGUFReader(path).fields
    assert fields == {key: library[key].contents() for key in fields}
    assert [fields[key] for key in "abcdef"] == [True, -3, 2**63, 0.1, ["x", "日本"], [1, -2]]


def test_model_config(tmp_path: Path) -> None:
    settings = TINY | {
        "attention.head_count_kv": [2, 2],
        "attention.key_length": 24,
        "attention.value_length": 24,
        "rope.dimension_count": 24,
        "rope.freq_base": 5000.0,
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 9,
    }
    tensors: dict[str, NDArray[Any]] = {
        "token_embd.weight": np.zeros((32, 64), np.float16),
        "output.weight": np.zeros((32, 64), np.float16),
        "rope_freqs.weight": np.arange(1, 13, dtype=np.float32),
    }
    config = config_of(write(tmp_path / "tiny.gguf", settings, tensors=tensors))
    assert (config.name, config.num_kv_heads, config.head_dim) == ("tiny", 2, 24)
    assert (config.vocab_size, config.dtype, config.eos_token_ids) == (32, "float16", (7, 9))
    assert not config.tie_word_embeddings
    assert config.rope.theta == 5000.0
    assert config.rope.rope_type == "freq_factors"
    assert config.rope.freq_factors == tuple(range(1, 13))


@pytest.mark.parametrize(
    ("settings", "factors", "expected"),
    [
        ({}, None, RopeConfig()),
        ({"rope.scaling.type": "none"}, None, RopeConfig()),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.freq_base": 5e5},
            None,
            RopeConfig(theta=5e5, rope_type="linear", factor=4.0),
        ),
        ({"rope.scaling.factor": 2.0}, None, RopeConfig(rope_type="linear", factor=2.0)),
        ({}, [1, 2, 4, 8.5] * 2, RopeConfig(rope_type="freq_factors", freq_factors=FACTORS)),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 0.5},
            [2, 4, 8, 17] * 2,
            RopeConfig(rope_type="freq_factors", freq_factors=FACTORS),
        ),
    ],
)
def test_rope_as_the_converter_writes_it(
    tmp_path: Path, settings: dict[str, Any], factors: list[float] | None, expected: RopeConfig
) -> None:
    tensors: dict[str, NDArray[Any]] = {"token_embd.weight": np.zeros((32, 64), np.float32)}
    if factors is not None:
        tensors["rope_freqs.weight"] = np.array(factors, np.float32)
    assert (
        config_of(write(tmp_path / "rope.gguf", TINY | settings, tensors=tensors)).rope == expected
    )


def test_rope_factors_of_another_length(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": np.zeros((32, 64), np.float32),
        "rope_freqs.weight": np.ones(7, np.float32),
    }
    file = write(tmp_path / "rope.gguf", TINY, tensors=tensors)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight is F32 \[7\], not F32 \[8\]"):
        config_of(file)


def test_an_unknown_tensor_type_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "kind.gguf"
    write(path, TINY)
    content = path.read_bytes()
    at = content.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    path.write_bytes(content[:at] + b"\xe7\3\0\0" + content[at + 4 :])
    with pytest.raises(StartupError, match=r"tensor token_embd\.weight is of the unknown type 999"):
        GGUFFile(path)


def test_tensors_lie_where_the_library_finds_them(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": gguf.quants.quantize(np.ones((3, 64), np.float32), Q8_0),
        "output_norm.weight": np.ones(5, np.float32),
    }
    path = tmp_path / "tiny.gguf"
    ours = write(path, TINY, tensors=tensors).tensors.values()
    assert [(t.name, t.shape, t.offset, t.type) for t in ours] == [
        (t.name, tuple(reversed(t.shape.tolist())), t.data_offset, t.tensor_type)
        for t in gguf.GGUFReader(path).tensors
    ]


def test_quantised_becomes_bfloat16(tmp_path: Path) -> None:
    packed = gguf.quants.quantize(np.ones((32, 64), np.float32), Q8_0)
    file = write(tmp_path / "q.gguf", TINY, tensors={"token_embd.weight": packed})
    config = config_of(file)
    assert (config.dtype, config.head_dim, config.vocab_size) == ("bfloat16", 16, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_count": 8}, "mixtures of experts"),
        ({"attention.head_count_kv": [2, 4]}, r"llama\.attention\.head_count_kv"),
        ({"rope.scaling.type": "yarn"}, "'yarn' is not supported"),
        ({"rope.dimension_count": 8, "attention.key_length": 16}, "8 of 16 dimensions"),
        ({"block_count": 0}, r"llama\.block_count must be a positive"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "refused.gguf", TINY | changes)
    with pytest.raises(ValueError, match=rf"refused\.gguf: .*{message}"):
        config_of(file)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'gemma3' is not supported"):
        config_of(write(tmp_path / "other.gguf", TINY, arch="gemma3"))


def test_truncation_is_found_wherever_it_is(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write(whole, TINY | {"tokenizer.ggml.tokens": ["a", "b"]})
    content = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(0, len(content), 13):
        cut.write_bytes(content[:size])
        with pytest.raises(StartupError, match=r"cut\.gguf"):
            GGUFFile(cut)


def test_truncated_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    write(path, TINY)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StartupError, match=r"cut\.gguf: truncated: tensor token_embd\.weight"):
        GGUFFile(path)


def test_malformed(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    write(path, TINY)
    content = path.read_bytes()
    for broken in (
        b"GGML" + content[4:],
        content[:4] + b"\0\0\0\3" + content[8:],  # big-endian
        content[:16] + b"\xff" * 8 + content[24:],  # number of fields
    ):
        path.write_bytes(broken)
        with pytest.raises(StartupError, match=r"bad\.gguf: not a readable GGUF file"):
            GGUFFile(path)


def test_malformed_lists_of_strings(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    key = "tokenizer.ggml.tokens"
    write(path, TINY | {key: ["long", "short"]})
    content = path.read_bytes()
    at = content.index(b"long")
    path.write_bytes(content[: at - 8] + b"\xff" * 8 + content[at:])
    with pytest.raises(StartupError, match=r"bad\.gguf: not a readable GGUF file"):
        GGUFFile(path)
    path.write_bytes(content.replace(b"long", b"\xff\xfe\xff\xfe"))
    file = GGUFFile(path)
    assert key in file.fields
    with pytest.raises(StartupError, match=rf"bad\.gguf: {key}: .*can't decode"):
        file.fields[key]
