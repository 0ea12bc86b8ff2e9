"""Small vocabularies, as tokenizer.json in a directory and as GGUF files."""

import json
from pathlib import Path
from typing import Any, Final

import gguf

from aioengine.checkpoint.source import ModelSource
from aioengine.frontend.tokenizer import BYTE_LEVEL_ALPHABET

BYTE_TOKENS: Final = sorted(BYTE_LEVEL_ALPHABET, key=BYTE_LEVEL_ALPHABET.__getitem__)
"""Token id = byte."""
BOS_ID: Final = 256
END_ID: Final = 257
SPECIAL: Final = ["<s>", "<|end|>"]
MERGES: Final = [("Ġ", "w"), ("Ġw", "as"), ("a", "s"), ("1", "2")]
MERGED: Final = ["Ġw", "Ġwas", "as", "12"]


def byte_level_directory(path: Path, config: dict[str, Any]) -> ModelSource:
    """All bytes, two special tokens (ids 256 and 257), a few merges."""
    tokens = [*BYTE_TOKENS, *SPECIAL, *MERGED]
    words = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "truncation": {
            "max_length": 8,
            "strategy": "LongestFirst",
            "stride": 0,
            "direction": "Right",
        },
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": content, "special": True, **flags}
            for token_id, content in zip((BOS_ID, END_ID), SPECIAL, strict=True)
        ],
        "normalizer": None,
        "pre_tokenizer": words,
        "post_processor": None,
        "decoder": words,
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [" ".join(merge) for merge in MERGES],
        },
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelSource(path, "hf")


def byte_level_gguf(path: Path, pre: str, **settings: Any) -> ModelSource:
    """The same vocabulary."""
    tokens = [*BYTE_TOKENS, *SPECIAL, *MERGED]
    return write_gguf(
        path,
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=[3 if token in SPECIAL else 1 for token in tokens],
        merges=[" ".join(merge) for merge in MERGES],
        bos_token_id=BOS_ID,
        eos_token_id=END_ID,
        **settings,
    )


def sentencepiece_gguf(path: Path, **settings: Any) -> ModelSource:
    """<unk> <s> </s>, all bytes, letters, and words of which "▁was" is reached in two ways."""
    words = ["▁w", "as", "▁was", "<user>", "▁", "w", "a", "s", "日"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [2, 3, 3, *[6] * 256, *(4 if word == "<user>" else 1 for word in words)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))]
    return write_gguf(
        path,
        model="llama",
        tokens=tokens,
        token_type=types,
        scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        **settings,
    )


def write_gguf(path: Path, **settings: Any) -> ModelSource:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in settings.items():
        full = f"tokenizer.{key}" if key.startswith("chat_template") else f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        else:
            writer.add_uint32(full, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource(path, "gguf")
