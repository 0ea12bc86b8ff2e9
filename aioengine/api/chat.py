"""POST /v1/chat/completions."""

import time
from typing import Any

from aiohttp import web

from aioengine.api.context import API, Api
from aioengine.api.decoding import decode_sampling_body
from aioengine.api.errors import invalid, unsupported
from aioengine.api.outputs import (
    chat_logprobs,
    collect,
    json_response,
    new_id,
    prompt_logprobs,
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
from aioengine.frontend.records import Generation, Update
from aioengine.frontend.text import ServedModel


async def chat_completions(request: web.Request) -> web.StreamResponse:
    api = request.app[API]
    body, unknown = decode_sampling_body(await request.read(), ChatBody)
    log_unknown_fields(api, unknown)
    model = api.served_as(body.model)
    if body.chat_template is not None:
        raise unsupported("chat_template")  # templates are the server's: a client's is code
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
        self._model = model
        self._body = body
        self._head = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model.name,
        }

    async def whole(self, generation: Generation) -> web.Response:
        updates = await collect(generation)
        choices = [
            self._choice(update, {"message": {"role": "assistant", "content": update.text}})
            for update in updates
        ]
        response: dict[str, Any] = {
            **self._head,
            "choices": choices,
            "usage": usage(generation.choices, len(generation.choices)),
        }
        first = generation.choices[0]
        if self._body.return_token_ids:
            response["prompt_token_ids"] = first.spec.prompt_ids
        if self._body.prompt_logprobs is not None:
            response["prompt_logprobs"] = await self._text.run(
                prompt_logprobs,
                self._model.tokenizer,
                first.spec.prompt_ids,
                first.prompt_logprobs,
            )
        return json_response(response)

    async def stream(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        options = self._body.stream_options or StreamOptions()
        return await stream_generation(
            request,
            generation,
            opening=[self._first_chunk(c.index, generation, options) for c in generation.choices],
            chunk=lambda update: self._chunk(update, generation, options),
            wants_details=bool(self._body.return_token_ids or self._body.logprobs),
            usage_head=self._head if options.include_usage else None,
            has_running_usage=options.continuous_usage_stats,
            n=len(generation.choices),
        )

    def _first_chunk(
        self, index: int, generation: Generation, options: StreamOptions
    ) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._with_usage({**self._head, "choices": [choice]}, index, generation, options)
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = generation.choices[0].spec.prompt_ids
        return chunk

    def _chunk(
        self, update: Update, generation: Generation, options: StreamOptions
    ) -> dict[str, Any]:
        choice = self._choice(update, {"delta": {"content": update.text} if update.text else {}})
        chunk = {**self._head, "choices": [choice]}
        return self._with_usage(chunk, update.index, generation, options)

    def _with_usage(
        self, chunk: dict[str, Any], index: int, generation: Generation, options: StreamOptions
    ) -> dict[str, Any]:
        if options.continuous_usage_stats:
            chunk["usage"] = usage([generation.choices[index]], 1)
        elif options.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, update: Update, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs:
            logprobs = chat_logprobs(self._model.tokenizer, update.token_ids, update.logprobs)
        choice = {
            "index": update.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
        }
        return {**choice, "token_ids": update.token_ids} if self._body.return_token_ids else choice
