"""Bodies of requests. msgspec checks types and bounds; what no type can say is checked here, too.

Fields of OpenAI's reference, and of vLLM's extras that change an answer, which we do not serve yet,
are listed in `UNSUPPORTED` with the values that ask for nothing; any other value is a 400 with code
"unsupported". Fields that nobody knows are ignored.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from aioengine import limits
from aioengine.api.errors import invalid, unsupported

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]

UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "allowed_token_ids": (None, []),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "length_penalty": (None, 1),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_embeds": (None, []),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(msgspec.Struct, kw_only=True):
    """What both routes share. None means: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=limits.MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=limits.MAX_SEED)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)] | None = None

    def biased_logits(self, vocab_size: int) -> tuple[tuple[int, float], ...]:
        """`logit_bias` by token id."""
        entries = self.logit_bias or {}
        if len(entries) > limits.MAX_LOGIT_BIAS:
            raise invalid(
                f"logit_bias has {len(entries)} entries, the limit is {limits.MAX_LOGIT_BIAS}",
                "logit_bias",
            )
        biases = []
        for name, bias in entries.items():
            is_number = name.isascii() and name.isdecimal() and len(name) <= 10
            if not is_number or int(name) >= vocab_size:
                raise invalid(
                    f"logit_bias: {name[:32]!r} is not a token id; those of this model are 0 to "
                    f"{vocab_size - 1}",
                    "logit_bias",
                )
            biases.append((int(name), bias))
        return tuple(biases)

    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(strings) > limits.MAX_STOP_STRINGS:
            raise invalid(
                f"at most {limits.MAX_STOP_STRINGS} stop strings, got {len(strings)}", "stop"
            )
        for text in strings:
            if not text:
                raise invalid("a stop string must not be empty", "stop")
            if len(text) > limits.MAX_STOP_STRING_CHARS:
                raise invalid(
                    f"a stop string has at most {limits.MAX_STOP_STRING_CHARS} characters, got "
                    f"{len(text)}",
                    "stop",
                )
        return strings


class CompletionBody(SamplingBody, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)] | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        entries = self.prompt
        if not entries:
            raise invalid("prompt must not be empty", "prompt")
        if all(isinstance(entry, int) for entry in entries):
            return [[entry for entry in entries if isinstance(entry, int)]]
        if len(entries) > limits.MAX_PROMPTS_PER_REQUEST:
            raise invalid(
                f"at most {limits.MAX_PROMPTS_PER_REQUEST} prompts in one request, got "
                f"{len(entries)}",
                "prompt",
            )
        texts = [entry for entry in entries if isinstance(entry, str)]
        lists = [entry for entry in entries if isinstance(entry, list)]
        if len(texts) == len(entries):
            return list(texts)
        if len(lists) == len(entries):
            return list(lists)
        raise invalid(
            "prompt must be a string, token ids, or a list of only one of these", "prompt"
        )


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class Message(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None

    def for_template(self) -> dict[str, Any]:
        """Plain objects; `ChatTemplate` joins the parts of a content."""
        if self.tool_calls:
            raise unsupported("messages.tool_calls")
        message = {"role": self.role, "content": msgspec.to_builtins(self.content) or ""}
        return message if self.name is None else {**message, "name": self.name}


Messages = Annotated[list[Message], Meta(min_length=1, max_length=limits.MAX_MESSAGES)]


class ChatBody(SamplingBody, kw_only=True):
    messages: Messages
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Of text (`prompt`), or of a conversation (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class RpcBody(msgspec.Struct, kw_only=True):
    """Of /collective_rpc."""

    method: str
    """A registered name."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Annotated[float, Meta(gt=0)] | None = None
    """Seconds."""
    unique_reply_rank: Annotated[int, Meta(ge=0)] | None = None
    """Rank of the replica whose value is wanted."""
