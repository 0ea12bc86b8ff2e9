"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from msgspec import UNSET

from aioengine.api.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    Usage,
)
from aioengine.api.context import API, Api
from aioengine.api.decoding import decode_sampling_body
from aioengine.api.errors import invalid
from aioengine.api.logprobs import chat_logprobs, prompt_logprobs
from aioengine.api.outputs import (
    collect,
    encode_answer,
    encoded_response,
    new_id,
    stream_generation,
    usage,
)
from aioengine.api.prompts import (
    choice_specs,
    encode_chat,
    log_unknown_fields,
    start_generation,
)
from aioengine.api.schema import ChatBody, StreamOptions
from aioengine.frontend.records import Choice, Generation, Update
from aioengine.frontend.text import ServedModel


async def chat_completions(request: web.Request) -> web.StreamResponse:
    api = request.app[API]
    body, unknown = decode_sampling_body(await request.read(), ChatBody)
    log_unknown_fields(api, unknown)
    model = api.served_as(body.model)
    prompt_ids = await encode_chat(api, model, body, body.messages)
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    specs = choice_specs(
        api,
        model,
        body,
        [prompt_ids],
        prompt_field="messages",
        max_tokens=getattr(body, limit),
        max_tokens_field=limit,
        logprobs=_num_logprobs(body),
    )
    answer = _Answer(api, model, body)
    async with start_generation(api, request, specs) as generation:
        if body.stream:
            return await answer.stream(request, generation)
        return await answer.whole(generation)


def _num_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    return None


class _Answer:
    """Formats one request's updates."""

    def __init__(self, api: Api, model: ServedModel, body: ChatBody) -> None:
        self._text = api.text
        self._tokenizer = model.tokenizer
        self._body = body
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model_name = model.name

    async def whole(self, generation: Generation) -> web.Response:
        updates = await collect(generation)
        if self._body.logprobs or self._body.prompt_logprobs is not None:
            return encoded_response(await self._text.run(self._encode, updates, generation))
        return encoded_response(self._encode(updates, generation))

    def _encode(self, updates: Sequence[Update], generation: Generation) -> bytes:
        choices = generation.choices
        answer = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model_name,
            choices=[],
            usage=usage(choices, len(choices)),
        )
        prompt_ids, logprobs = choices[0].spec.prompt_ids, choices[0].prompt_logprobs
        if self._body.return_token_ids:
            answer.prompt_token_ids = list(prompt_ids)
        if (num_top := self._body.prompt_logprobs) is not None:
            answer.prompt_logprobs = prompt_logprobs(self._tokenizer, prompt_ids, logprobs, num_top)
        made = (
            ChatChoice(message=ChatMessage(update.text), **self._common(update))
            for update in updates
        )
        return encode_answer(answer, made)

    async def stream(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        options = self._body.stream_options or StreamOptions()
        return await stream_generation(
            request,
            generation,
            opening=[self._first_chunk(choice, options) for choice in generation.choices],
            chunk=lambda update: self._chunk(update, generation.choices[update.index], options),
            wants_details=bool(self._body.return_token_ids or self._body.logprobs),
            usage_chunk=self._usage_chunk if options.include_usage else None,
            has_running_usage=options.continuous_usage_stats,
            n=len(generation.choices),
        )

    def _first_chunk(self, record: Choice, options: StreamOptions) -> ChatChunk:
        delta = ChatDelta(role="assistant", content="")
        choice = ChatChunkChoice(index=record.index, delta=delta, logprobs=None)
        chunk = self._with_usage([choice], record, options)
        if self._body.return_token_ids:
            chunk.prompt_token_ids = list(record.spec.prompt_ids)
        return chunk

    def _chunk(self, update: Update, record: Choice, options: StreamOptions) -> ChatChunk:
        delta = ChatDelta(content=update.text or UNSET)
        choice = ChatChunkChoice(delta=delta, **self._common(update))
        return self._with_usage([choice], record, options)

    def _with_usage(
        self, choices: list[ChatChunkChoice], record: Choice, options: StreamOptions
    ) -> ChatChunk:
        chunk = self._chunk_of(choices)
        if options.continuous_usage_stats:
            chunk.usage = usage([record], 1)
        elif options.include_usage:
            chunk.usage = None
        return chunk

    def _usage_chunk(self, total: Usage) -> ChatChunk:
        chunk = self._chunk_of([])
        chunk.usage = total
        return chunk

    def _chunk_of(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._id, created=self._created, model=self._model_name, choices=choices
        )

    def _common(self, update: Update) -> dict[str, Any]:
        """Fields of whole choices and of their parts."""
        logprobs = None
        if self._body.logprobs:
            logprobs = chat_logprobs(self._tokenizer, update.token_ids, update.logprobs)
        return {
            "index": update.index,
            "logprobs": logprobs,
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
            "token_ids": update.token_ids if self._body.return_token_ids else UNSET,
        }
