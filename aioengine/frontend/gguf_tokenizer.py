"""GGUF vocabulary to a `tokenizers.Tokenizer`: byte-level BPE (gpt2) and SentencePiece (llama)."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from aioengine.checkpoint.gguf_file import GGUFFile


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How text is split before byte pairs are merged: each pattern cuts what the ones before left.

    `tokenizer.ggml.pre` names it; the file holds the name only.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token as a whole stays whole."""
    add_bos: bool = False
    """Where the file does not say."""
    composes: bool = False
    """Unicode NFC first."""


# The patterns are the published ones of the models (GPT-2, Llama 3, Qwen 2, Mistral Nemo).
GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS: Final = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_WORDS: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

GPT2: Final = PreTokenizer(patterns=(GPT2_WORDS,))
SINGLE_DIGITS: Final = PreTokenizer(patterns=(r"\p{N}", GPT2_WORDS))
LLAMA3: Final = PreTokenizer(patterns=(LLAMA3_WORDS,), ignore_merges=True, add_bos=True)
QWEN2: Final = PreTokenizer(patterns=(QWEN2_WORDS,), composes=True)
TEKKEN: Final = PreTokenizer(patterns=(TEKKEN_WORDS,), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Final = {
    "default": GPT2,
    "gpt-2": GPT2,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "tekken": TEKKEN,
}


def tokenizer_from_gguf(file: GGUFFile) -> tokenizers.Tokenizer:
    """Raises ValueError that names file and key for what is missing or not supported."""
    tokens: list[str] = _need(file, "tokens")
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens repeats a token")
    types: list[int] = _per_token(file, "token_type")
    kind = _need(file, "model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(file, tokens, types)
    else:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; gpt2, llama are"
        )
    added = [
        AddedToken(token, normalized=False, special=token_type != TokenType.USER_DEFINED)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    first = _added_token(file, "bos", adds_bos)
    last = _added_token(file, "eos", False)
    if first or last:
        tokenizer.post_processor = adding_processor(first, last)
    return tokenizer


def adding_processor(
    first: tuple[str, int] | None, last: tuple[str, int] | None
) -> processors.PostProcessor:
    """Puts tokens (text, id) around every text that is encoded with special tokens."""
    before, after = ([] if token is None else [token] for token in (first, last))
    return processors.TemplateProcessing(
        single=[*(text for text, _ in before), "$A", *(text for text, _ in after)],
        special_tokens=[*before, *after],
    )


def _added_token(file: GGUFFile, kind: str, default: bool) -> tuple[str, int] | None:
    """Text and id of the bos or eos token, when encoding adds it."""
    if not file.fields.get(f"tokenizer.ggml.add_{kind}_token", default):
        return None
    token_id, token = _need(file, f"{kind}_token_id"), special_token(file, kind)
    assert token is not None
    return token, token_id


def special_token(file: GGUFFile, kind: str) -> str | None:
    """The token that `tokenizer.ggml.{kind}_token_id` points to, or None without that key.

    Raises ValueError when it points outside the vocabulary.
    """
    tokens = _need(file, "tokens")
    token_id = file.fields.get(f"tokenizer.ggml.{kind}_token_id")
    if token_id is None:
        return None
    if token_id >= len(tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.{kind}_token_id is {token_id}, but there are "
            f"{len(tokens)} tokens"
        )
    return str(tokens[token_id])


def _need(file: GGUFFile, key: str) -> Any:
    full = f"tokenizer.ggml.{key}"
    if full not in file.fields:
        raise ValueError(f"{file.path}: {full} is missing")
    return file.fields[full]


def _per_token(file: GGUFFile, key: str) -> Any:
    values, num_tokens = _need(file, key), len(_need(file, "tokens"))
    if len(values) != num_tokens:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.{key} has {len(values)} entries for {num_tokens} tokens"
        )
    return values


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, and whether it adds a bos token unless the file says otherwise."""
    name = _need(file, "pre")
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre {name!r} is not known; "
            f"{', '.join(sorted(PRE_TOKENIZERS))} are"
        )
    pre = PRE_TOKENIZERS[name]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab, merges=_listed_merges(file, vocab), ignore_merges=pre.ignore_merges
    )
    tokenizer = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, alphabet])
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(
    file: GGUFFile, tokens: list[str], types: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, and whether it adds a bos token unless the file says otherwise."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab,
        merges=_merges_by_score(vocab, types, _per_token(file, "scores")),
        unk_token=special_token(file, "unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    mark_spaces = normalizers.Replace(" ", "▁")
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.fields.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark_spaces])
        tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = mark_spaces
        tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer, True


def _listed_merges(file: GGUFFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for merge in _need(file, "merges"):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ValueError(
                f"{file.path}: tokenizer.ggml.merges: {merge!r} does not make a token of two tokens"
            )
        merges.append((left, right))
    return merges


def _merges_by_score(
    vocab: dict[str, int], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to build a token from two others, best token first.

    SentencePiece merges whichever neighbours give the token of the highest score.
    """
    normal = [token for token, token_id in vocab.items() if types[token_id] == TokenType.NORMAL]
    normal.sort(key=lambda token: -scores[vocab[token]])
    return [
        (token[:cut], token[cut:])
        for token in normal
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
