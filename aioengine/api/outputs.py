"""Parts of responses that both generation routes share: ids, usage, log probabilities."""

import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from aioengine.api.errors import ApiError, error_body
from aioengine.api.sse import EventStream, EventTemplate, event
from aioengine.errors import RequestFailedError
from aioengine.frontend.records import Choice, Generation, Update
from aioengine.frontend.tokenizer import Tokenizer
from aioengine.messages import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def json_response(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Token counts; a prompt that n choices share counts once."""
    prompts = choices[::n]
    prompt_tokens = sum(len(choice.spec.prompt_ids) for choice in prompts)
    completion_tokens = sum(choice.num_output_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.num_cached_tokens for choice in prompts)
        },
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """The chat route's `logprobs` object."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return {
        "content": [
            {
                **entry(token_id, item.logprob),
                "top_logprobs": [entry(top_id, logprob) for top_id, logprob in item.top],
            }
            for token_id, item in zip(token_ids, logprobs, strict=True)
        ]
    }


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    offset: int = 0,
) -> dict[str, Any]:
    """The completions route's `logprobs` object; `offset` is where its text begins.

    Of each position the chosen token first, then the best ones: "up to logprobs + 1 elements"
    (https://platform.openai.com/docs/api-reference/completions/create).
    """
    tokens = [tokenizer.token_text(token_id) for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [finite(item.logprob) for item in logprobs],
        "top_logprobs": [
            {
                token: finite(item.logprob),
                **{tokenizer.token_text(top_id): finite(logprob) for top_id, logprob in item.top},
            }
            for token, item in zip(tokens, logprobs, strict=True)
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token an object by token id, the token itself first;
    nothing predicts the first token."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }

    described: list[dict[str, Any] | None] = [None]
    for token_id, item in zip(token_ids[1:], logprobs, strict=True):
        position = {str(token_id): entry(token_id, item.logprob, item.rank)}
        for rank, (top_id, logprob) in enumerate(item.top, start=1):
            if top_id != token_id:
                position[str(top_id)] = entry(top_id, logprob, rank)
        described.append(position)
    return described


async def collect(generation: Generation) -> list[Update]:
    """Wait for the end; one merged Update per choice. Raises ApiError 503 when one failed."""
    whole = [Update(choice.index) for choice in generation.choices]
    try:
        for update in await generation.wait_end():
            whole[update.index].extend(update)
    except RequestFailedError as error:
        raise ApiError(503, str(error)) from None
    return whole


class _Chunks:
    """Turns updates into events and writes them: the Sink of one stream."""

    def __init__(
        self,
        stream: EventStream,
        chunk: Callable[[Update], dict[str, Any]],
        *,
        wants_details: bool,
        differ_by_text: bool,
    ) -> None:
        self._stream = stream
        self._chunk = chunk
        self._wants_details = wants_details
        self._differ_by_text = differ_by_text
        self._templates: dict[int, EventTemplate] = {}
        """By choice."""

    def write(self, updates: list[Update]) -> bool:
        events = []
        for update in updates:
            text = update.text
            if update.finish_reason is not None or not self._differ_by_text:
                if text or update.finish_reason or (self._wants_details and update.token_ids):
                    events.append(event(self._chunk(update)))
            elif text:
                template = self._templates.get(update.index) or self._make_template(update.index)
                events.append(template.fill(text))
        return self._stream.write_nowait(events)

    async def drain(self) -> None:
        await self._stream.drain()

    def _make_template(self, index: int) -> EventTemplate:
        example = Update(index, [EventTemplate.GAP])
        template = self._templates[index] = EventTemplate(self._chunk(example))
        return template


async def stream_generation(
    request: web.Request,
    generation: Generation,
    *,
    chunk: Callable[[Update], dict[str, Any]],
    wants_details: bool,
    usage_head: dict[str, Any] | None,
    has_running_usage: bool,
    n: int,
    opening: Sequence[dict[str, Any]] = (),
) -> web.StreamResponse:
    """Send updates as they come, formatted by `chunk`, then the usage where it was asked for.

    An update without text waits for the next, unless the client `wants_details` of each token;
    without those and `has_running_usage`, chunks of a choice differ by their text only, but for the
    last. A failure is one error event, then the end.
    """
    stream = EventStream(request)
    await stream.open(map(event, opening))
    chunks = _Chunks(
        stream,
        chunk,
        wants_details=wants_details,
        differ_by_text=not wants_details and not has_running_usage,
    )
    last: list[bytes] = []
    try:
        await generation.feed(chunks)
    except RequestFailedError as error:
        last.append(event(error_body(503, str(error))))
    else:
        if usage_head is not None:
            total = usage(generation.choices, n)
            last.append(event({**usage_head, "choices": [], "usage": total}))
    await stream.close(last)
    return stream.response
