"""Parts of responses that both generation routes share: ids, usage, streams."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from aioengine.api.answers import PromptTokensDetails, Usage
from aioengine.api.errors import ApiError, error_body
from aioengine.api.sse import EventStream, EventTemplate, event
from aioengine.errors import RequestFailedError
from aioengine.frontend.records import Choice, Generation, Update


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def json_response(body: Any) -> web.Response:
    return encoded_response(msgspec.json.encode(body))


def encoded_response(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def encode_answer(answer: msgspec.Struct, choices: Iterable[msgspec.Struct]) -> bytes:
    """JSON of an answer whose `choices` are empty so far, with these. They are made and encoded one
    by one: all of them, with their log probabilities, may take gigabytes as objects."""
    before, empty, after = msgspec.json.encode(answer).partition(b'"choices":[]')
    assert empty
    return b"".join(
        [before, b'"choices":[', b",".join(map(msgspec.json.encode, choices)), b"]", after]
    )


def usage(choices: Sequence[Choice], n: int) -> Usage:
    """Token counts; a prompt that n choices share counts once."""
    prompts = choices[::n]
    prompt_tokens = sum(len(choice.spec.prompt_ids) for choice in prompts)
    completion_tokens = sum(choice.num_output_tokens for choice in choices)
    cached_tokens = sum(choice.num_cached_tokens for choice in prompts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens),
    )


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
        chunk: Callable[[Update], msgspec.Struct],
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
    chunk: Callable[[Update], msgspec.Struct],
    wants_details: bool,
    usage_chunk: Callable[[Usage], msgspec.Struct] | None,
    has_running_usage: bool,
    n: int,
    opening: Sequence[msgspec.Struct] = (),
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
        if usage_chunk is not None:
            last.append(event(usage_chunk(usage(generation.choices, n))))
    await stream.close(last)
    return stream.response
