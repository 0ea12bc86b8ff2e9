"""Bodies of requests. msgspec checks types and bounds; `/openapi.json` is made from the same types.

Fields of OpenAI's reference, and of vLLM's extras that change an answer, which we do not serve yet,
are listed in `UNSUPPORTED` with the values that ask for nothing; any other value is a 400 with code
"unsupported". Serving one begins with taking it out of that table: the grammar of an answer
(`response_format`, `structured_outputs`) becomes a part of `ChoiceParams` and a mask in
`worker/logit_rules.py`; `tools` go to the template, and `chat.py` turns text into calls. Fields
that nobody knows are ignored.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from aioengine import limits
from aioengine.api.errors import invalid, unsupported
from aioengine.frontend.sampling import NumLogprobs, SamplingFields, TokenId

UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "add_special_tokens": (None, False),
    "allowed_token_ids": (None, []),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "detokenize": (None, True),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "kv_transfer_params": (None, {}),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "prompt_cache_retention": (None, "in_memory", "in-memory"),
    "prompt_embeds": (None, []),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "return_tokens_as_token_ids": (None, False),
    "service_tier": (None, "auto", "default"),
    "structured_outputs": (None, {}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
"""A body that has a field of that name serves it: `echo` is a completion's."""

UNSUPPORTED_PARTS: Final = frozenset(
    {"audio_url", "file", "image_embeds", "image_url", "input_audio", "refusal", "video_url"}
)
"""Types of content parts that other servers know."""

Nothing = Annotated[Any, Meta(extra_json_schema={"enum": [None]})]
"""The type of a field in which anything but null is not supported."""

Empty = Annotated[list[Any], Meta(extra_json_schema={"maxItems": 0})]
"""Likewise of a list that has to be empty."""


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] = False


class SamplingBody(SamplingFields, kw_only=True):
    """What both routes share. None means: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    """Taken without effect, like the next four: nothing is stored, nobody is told apart."""
    metadata: dict[str, str] | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


Prompts = Annotated[
    list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
    Meta(
        min_length=1,
        description="Token ids; or several prompts, each of them text or each of them token ids.",
        extra_json_schema={
            "anyOf": [
                {"items": {"type": "integer"}},
                {"items": {"type": "string"}, "maxItems": limits.MAX_PROMPTS_PER_REQUEST},
                {"items": {"type": "array"}, "maxItems": limits.MAX_PROMPTS_PER_REQUEST},
            ]
        },
    ),
]


class CompletionBody(SamplingBody, kw_only=True):
    prompt: str | Prompts
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """0 goes with what asks about the prompt: `echo` or `prompt_logprobs`."""
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    best_of: Annotated[int, Meta(ge=1, le=limits.MAX_CHOICES)] | None = None
    """Answers to choose the best n from. Only where it asks for no choosing: 1, or n."""
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        entries = self.prompt
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


class TextPart(msgspec.Struct):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=limits.MAX_ROLE_CHARS)]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: Empty | None = None
    function_call: Nothing = None
    audio: Nothing = None

    def for_template(self) -> dict[str, Any]:
        """Plain objects; `ChatTemplate` joins the parts of a content."""
        for name in ("tool_calls", "function_call", "audio"):
            if getattr(self, name) not in (None, []):
                raise unsupported(f"messages.{name}")
        message = {"role": self.role, "content": msgspec.to_builtins(self.content) or ""}
        return message if self.name is None else {**message, "name": self.name}


Messages = Annotated[list[Message], Meta(min_length=1, max_length=limits.MAX_MESSAGES)]


class ChatBody(SamplingBody, kw_only=True):
    messages: Messages
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Nothing = None
    """Templates are the server's: a client's is code."""


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Of text (`prompt`), or of a conversation (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Nothing = None
    """What would change a conversation's text is refused here as in a chat."""
    tools: Empty | None = None
    documents: Empty | None = None
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
