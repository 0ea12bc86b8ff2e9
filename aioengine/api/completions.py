"""POST /v1/completions."""

import time
from typing import Any

from aiohttp import web

from aioengine.api.context import API, Api
from aioengine.api.decoding import decode_sampling_body
from aioengine.api.outputs import (
    collect,
    completion_logprobs,
    json_response,
    new_id,
    prompt_logprobs,
    stream_generation,
    usage,
)
from aioengine.api.prompts import (
    choice_specs,
    encode_text,
    log_unknown_fields,
    start_generation,
)
from aioengine.api.schema import CompletionBody, StreamOptions
from aioengine.frontend.records import Generation, Update
from aioengine.frontend.text import ServedModel

DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    api = request.app[API]
    body, unknown = decode_sampling_body(await request.read(), CompletionBody)
    log_unknown_fields(api, unknown)
    model = api.served_as(body.model)
    prompts = [
        await encode_text(api, model, prompt, body.add_special_tokens)
        if isinstance(prompt, str)
        else prompt
        for prompt in body.prompts()
    ]
    specs = choice_specs(
        api,
        model,
        body,
        prompts,
        prompt_field="prompt",
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
    )
    answer = _Answer(api, model, body)
    async with start_generation(api, request, specs) as generation:
        if body.stream:
            return await answer.stream(request, generation)
        return await answer.whole(generation)


class _Answer:
    """Formats one request's updates."""

    def __init__(self, api: Api, model: ServedModel, body: CompletionBody) -> None:
        self._text = api.text
        self._model = model
        self._body = body
        self._n = body.n or 1
        self._text_offsets: dict[int, int] = {}
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }

    async def whole(self, generation: Generation) -> web.Response:
        updates = await collect(generation)
        choices = [self._choice(update) for update in updates]
        response = {**self._head, "choices": choices, "usage": usage(generation.choices, self._n)}
        if self._body.return_token_ids:
            prompts = [choice.spec.prompt_ids for choice in generation.choices[:: self._n]]
            for choice, record in zip(choices, generation.choices, strict=True):
                choice["prompt_token_ids"] = record.spec.prompt_ids
            response["prompt_token_ids"] = prompts[0] if len(prompts) == 1 else prompts
        if self._body.prompt_logprobs is not None:
            for first in range(0, len(choices), self._n):
                record = generation.choices[first]
                described = await self._text.run(
                    prompt_logprobs,
                    self._model.tokenizer,
                    record.spec.prompt_ids,
                    record.prompt_logprobs,
                )
                for choice in choices[first : first + self._n]:
                    choice["prompt_logprobs"] = described
        return json_response(response)

    async def stream(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        options = self._body.stream_options or StreamOptions()
        return await stream_generation(
            request,
            generation,
            chunk=lambda update: self._chunk(update, generation, options),
            wants_details=bool(self._body.return_token_ids) or self._body.logprobs is not None,
            usage_head=self._head if options.include_usage else None,
            has_running_usage=options.continuous_usage_stats,
            n=self._n,
        )

    def _chunk(
        self, update: Update, generation: Generation, options: StreamOptions
    ) -> dict[str, Any]:
        choice = self._choice(update)
        chunk = {**self._head, "choices": [choice]}
        record = generation.choices[update.index]
        if self._body.return_token_ids and record.num_output_tokens == len(update.token_ids):
            choice["prompt_token_ids"] = record.spec.prompt_ids
            chunk["prompt_token_ids"] = record.spec.prompt_ids
        if options.continuous_usage_stats:
            chunk["usage"] = usage([record], 1)
        elif options.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, update: Update) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            offset = self._text_offsets.get(update.index, 0)
            logprobs = completion_logprobs(
                self._model.tokenizer, update.token_ids, update.logprobs, offset
            )
            self._text_offsets[update.index] = offset + sum(map(len, logprobs["tokens"]))
        choice = {
            "index": update.index,
            "text": update.text,
            "logprobs": logprobs,
            "finish_reason": update.finish_reason,
            "stop_reason": update.stop_reason,
        }
        return {**choice, "token_ids": update.token_ids} if self._body.return_token_ids else choice
