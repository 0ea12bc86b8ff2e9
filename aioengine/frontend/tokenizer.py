"""Tokenizer: text to token ids and back, from tokenizer.json or from GGUF metadata."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from aioengine.checkpoint.gguf_file import GGUFFile
from aioengine.checkpoint.json_object import read_json_object
from aioengine.checkpoint.source import ModelSource
from aioengine.frontend.gguf_tokenizer import adding_processor, special_token, tokenizer_from_gguf

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
SPACE_MARK: Final = "▁"


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL_ALPHABET: Final = _byte_level_alphabet()


class Tokenizer:
    """A loaded tokenizer. Safe to use from several threads.

    Raises ValueError for a vocabulary whose tokens do not stand for fixed bytes.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None,
        eos_token: str | None,
        chat_template: str | None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._is_byte_level = _is_byte_level(backend)
        self._bytes: dict[int, bytes] = {}
        self.whole_texts: Mapping[int, str | None] = _WholeTexts(self)
        """`token_bytes` as text, where they are whole characters; made when first asked for."""
        added = backend.get_added_tokens_decoder()
        self._added_ids = added.keys()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_token_id = None if bos_token is None else backend.token_to_id(bos_token)
        self.eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
        self.chat_template = chat_template
        self.max_token_bytes = max(len(token.encode()) for token in backend.get_vocab())
        """An upper bound: tokens of byte-level vocabularies are spelt with two bytes for some."""
        self.add_bos = _begins_with(backend, self.bos_token_id)
        """Whether encoding with special tokens begins with the bos token."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Special tokens that `text` spells out become their ids in either case."""
        # The batch calls let go of the interpreter lock, so the event loop stays free.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """As a text of its own: a SentencePiece text loses the space before its first word."""
        return self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, exactly; nothing for an id outside the vocabulary."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._to_bytes(token_id)
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """`token_bytes` for people: U+FFFD stands for parts of characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _to_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            if token_id in self._added_ids or not BYTE_LEVEL_ALPHABET.keys() >= set(token):
                return token.encode()
            return bytes(BYTE_LEVEL_ALPHABET[char] for char in token)
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace(SPACE_MARK, " ").encode()


class _WholeTexts(dict[int, str | None]):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Raises ValueError for what is missing, broken or not supported, StartupError for a GGUF file
    that cannot be read."""
    if source.kind == "gguf":
        return _from_gguf(GGUFFile(source.path))
    path = source.path / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{source.path} has no tokenizer.json; convert its tokenizer (with transformers: "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…)), or name another by --tokenizer"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: {error}") from error
    config_path = source.path / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.is_file() else {}
    template_path = source.path / "chat_template.jinja"
    template = (
        template_path.read_text(encoding="utf-8")
        if template_path.is_file()
        else _template_in_config(config)
    )
    bos_token = _content(config.get("bos_token"))
    if config.get("add_bos_token"):
        _make_it_add(backend, bos_token, config_path)
    return Tokenizer(
        backend,
        bos_token=bos_token,
        eos_token=_content(config.get("eos_token")),
        chat_template=template,
    )


def _from_gguf(file: GGUFFile) -> Tokenizer:
    return Tokenizer(
        tokenizer_from_gguf(file),
        bos_token=special_token(file, "bos"),
        eos_token=special_token(file, "eos"),
        chat_template=file.fields.get("tokenizer.chat_template"),
    )


def _template_in_config(config: dict[str, Any]) -> str | None:
    """One template, or a list of named ones of which `default` counts."""
    value = config.get("chat_template")
    if isinstance(value, list):
        return next((entry["template"] for entry in value if entry["name"] == "default"), None)
    return value


def _content(token: Any) -> str | None:
    """A special token of tokenizer_config.json: a string, or an object with its `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _begins_with(backend: tokenizers.Tokenizer, token_id: int | None) -> bool:
    return token_id is not None and backend.encode("").ids[:1] == [token_id]


def _make_it_add(backend: tokenizers.Tokenizer, bos_token: str | None, config_path: Path) -> None:
    """Honour add_bos_token where tokenizer.json itself does not."""
    token_id = None if bos_token is None else backend.token_to_id(bos_token)
    if bos_token is None or token_id is None:
        raise ValueError(f"{config_path}: add_bos_token without a bos_token of the vocabulary")
    if not _begins_with(backend, token_id):
        backend.post_processor = adding_processor((bos_token, token_id), None)


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Byte-level, or SentencePiece with its space mark. Raises ValueError for anything else."""
    state = backend.decoder.__getstate__() if backend.decoder else b"{}"
    decoder = json.loads(state)
    steps = [step.get("type") for step in decoder.get("decoders", [decoder])]
    if "ByteLevel" in steps:
        return True
    if "Metaspace" in steps or ("Replace" in steps and "Fuse" in steps):
        return False
    raise ValueError(
        f"tokenizers with a decoder of {steps} are not supported; byte-level and SentencePiece "
        "ones are"
    )
