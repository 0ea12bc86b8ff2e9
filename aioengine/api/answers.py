"""What routes answer; `/openapi.json` is made from the same types. UNSET: left out."""

from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from aioengine.messages import FinishReason

LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


# --- both generation routes ---------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """A prompt that several choices share counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""vLLM's form: per prompt token an object by token id, the token itself first; nothing predicts the
first token."""


class Choice(msgspec.Struct, kw_only=True):
    """What choices of both routes, whole or in chunks, have in common."""

    index: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id of a stop token that is no end-of-sequence token."""
    token_ids: list[int] | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    id: str
    created: int
    """Unix time, seconds."""
    model: str


# --- /v1/completions ----------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    """Lists with an entry for each token; null for a token that nothing predicts."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The token itself first, then the best ones: "up to logprobs + 1 elements"
    (https://platform.openai.com/docs/api-reference/completions/create)."""
    text_offset: list[int]
    """Where in the choice's text each token begins."""


class CompletionChoice(Choice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionPart(Answer, kw_only=True):
    """A whole completion but for its usage; or an event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    prompt_token_ids: list[int | list[int]] | UnsetType = UNSET
    """Of one prompt, or a list for each."""
    usage: Usage | UnsetType | None = UNSET


class Completion(CompletionPart, kw_only=True):
    usage: Usage


# --- /v1/chat/completions -----------------------------------------------------------------------


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChosenLogprob]


class ChatMessage(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(Choice, kw_only=True):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletion(Answer, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunk(Answer, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# --- models and tokenizer -----------------------------------------------------------------------


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["aioengine"] = "aioengine"
    max_model_len: int


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizerInfo(msgspec.Struct, kw_only=True):
    vocab_size: int
    """Of the model; a tokenizer may know fewer."""
    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    eos_token_ids: list[int]
    """What ends an answer."""
    add_bos_token: bool
    chat_template: str | None
    max_model_len: int


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct):
    prompt: str


# --- others -------------------------------------------------------------------------------------


class Status(msgspec.Struct, kw_only=True):
    status: str
    causes: list[str] | UnsetType = UNSET


class Version(msgspec.Struct):
    version: str


class RpcResults(msgspec.Struct):
    results: list[Any]


class Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    """The field of the body that is at fault."""
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """OpenAI's form."""

    error: Error
