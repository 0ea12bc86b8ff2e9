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
from aioengine.frontend.sampling import SamplingFields, TokenId

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


class SamplingBody(SamplingFields, kw_only=True):
    """What both routes share. None means: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


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

    method: Annotated[str, Meta(max_length=limits.MAX_METHOD_CHARS)]
    """A registered name."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Annotated[float, Meta(gt=0)] | None = None
    """Seconds."""
    unique_reply_rank: Annotated[int, Meta(ge=0)] | None = None
    """Rank of the replica whose value is wanted."""
