"""POST /v1/completions."""

import time
from collections.abc import Iterator, Sequence

from aiohttp import web
from msgspec import UNSET, UnsetType

from aioengine.api.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionPart,
    PromptLogprobs,
    Usage,
)
from aioengine.api.context import API, Api
from aioengine.api.decoding import decode_sampling_body
from aioengine.api.errors import invalid
from aioengine.api.logprobs import CompletionTokens, joined, prompt_logprobs
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
    context_of,
    encode_text,
    log_unknown_fields,
    start_generation,
)
from aioengine.api.schema import CompletionBody, StreamOptions
from aioengine.frontend.choices import check_prompt
from aioengine.frontend.records import Choice, Generation, Update
from aioengine.frontend.text import ServedModel

DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    api = request.app[API]
    body, unknown = decode_sampling_body(await request.read(), CompletionBody)
    log_unknown_fields(api, unknown)
    model = api.served_as(body.model)
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise invalid("max_tokens 0 goes with echo or prompt_logprobs", "max_tokens")
    if body.best_of not in (None, 1, body.n or 1):
        raise invalid("best_of other than n is not supported", "best_of", "unsupported")
    prompts = body.prompts()
    prompt_ids = [
        await encode_text(api, model, prompt, body.add_special_tokens)
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]
    specs = choice_specs(
        api,
        model,
        body,
        prompt_ids,
        prompt_field="prompt",
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        echoes=await _echoes(api, model, body, prompts) if body.echo else None,
    )
    answer = _Answer(api, model, body)
    async with start_generation(api, request, specs) as generation:
        if body.stream:
            return await answer.stream(request, generation)
        return await answer.whole(generation)


async def _echoes(
    api: Api, model: ServedModel, body: CompletionBody, prompts: list[str | list[int]]
) -> list[str]:
    """The text of every prompt; the client's own where it sent one."""
    texts = []
    for prompt in prompts:
        if isinstance(prompt, str):
            texts.append(prompt)
            continue
        check_prompt(model, prompt, "prompt", context_of(api), body.max_tokens)
        skips_special = body.skip_special_tokens is not False
        decode = model.tokenizer.decode
        texts.append(await api.text.run(decode, prompt, skip_special_tokens=skips_special))
    return texts


class _Answer:
    """Formats one request's updates."""

    def __init__(self, api: Api, model: ServedModel, body: CompletionBody) -> None:
        self._text = api.text
        self._tokenizer = model.tokenizer
        self._body = body
        self._n = body.n or 1
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._model_name = model.name
        self._tokens: dict[int, CompletionTokens] = {}
        """By choice, from its first update on."""

    async def whole(self, generation: Generation) -> web.Response:
        updates = await collect(generation)
        if self._body.logprobs is not None or self._body.prompt_logprobs is not None:
            return encoded_response(await self._text.run(self._encode, updates, generation))
        return encoded_response(self._encode(updates, generation))

    def _encode(self, updates: Sequence[Update], generation: Generation) -> bytes:
        answer = Completion(
            id=self._id,
            created=self._created,
            model=self._model_name,
            choices=[],
            usage=usage(generation.choices, self._n),
        )
        if self._body.return_token_ids:
            prompts = [list(choice.spec.prompt_ids) for choice in generation.choices[:: self._n]]
            answer.prompt_token_ids = [*prompts[0]] if len(prompts) == 1 else [*prompts]
        return encode_answer(answer, self._choices(updates, generation))

    async def stream(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        options = self._body.stream_options or StreamOptions()
        return await stream_generation(
            request,
            generation,
            chunk=lambda update: self._chunk(update, generation.choices[update.index], options),
            wants_details=bool(self._body.return_token_ids) or self._body.logprobs is not None,
            usage_chunk=self._usage_chunk if options.include_usage else None,
            has_running_usage=options.continuous_usage_stats,
            n=self._n,
        )

    def _chunk(self, update: Update, record: Choice, options: StreamOptions) -> CompletionPart:
        choice = self._choice(update, record)
        chunk = self._part([choice])
        if self._body.return_token_ids and record.num_output_tokens == len(update.token_ids):
            choice.prompt_token_ids = list(record.spec.prompt_ids)
            chunk.prompt_token_ids = [*choice.prompt_token_ids]
        if options.continuous_usage_stats:
            chunk.usage = usage([record], 1)
        elif options.include_usage:
            chunk.usage = None
        return chunk

    def _usage_chunk(self, total: Usage) -> CompletionPart:
        chunk = self._part([])
        chunk.usage = total
        return chunk

    def _part(self, choices: list[CompletionChoice]) -> CompletionPart:
        return CompletionPart(
            id=self._id, created=self._created, model=self._model_name, choices=choices
        )

    def _choices(
        self, updates: Sequence[Update], generation: Generation
    ) -> Iterator[CompletionChoice]:
        """Each with what it says of its prompt; n that follow each other have one prompt."""
        described: PromptLogprobs | UnsetType = UNSET
        for update in updates:
            record = generation.choices[update.index]
            prompt_ids = record.spec.prompt_ids
            choice = self._choice(update, record)
            if self._body.return_token_ids:
                choice.prompt_token_ids = list(prompt_ids)
            num_top = self._body.prompt_logprobs
            if num_top is not None and update.index % self._n == 0:
                logprobs = record.prompt_logprobs
                described = prompt_logprobs(self._tokenizer, prompt_ids, logprobs, num_top)
            choice.prompt_logprobs = described
            yield choice

    def _choice(self, update: Update, record: Choice) -> CompletionChoice:
        choice = CompletionChoice(
            index=update.index,
            text=update.text,
            logprobs=self._logprobs(update, record),
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = update.token_ids
        return choice

    def _logprobs(self, update: Update, record: Choice) -> CompletionLogprobs | None:
        """Of the update's tokens; before the first of them, of the prompt's that are echoed."""
        if self._body.logprobs is None:
            return None
        tokens = self._tokens.get(update.index)
        if tokens is not None:
            return tokens.describe(update.token_ids, update.logprobs)
        tokens = self._tokens[update.index] = CompletionTokens(
            self._tokenizer,
            skips_special_tokens=self._body.skip_special_tokens is not False,
            num_top=self._body.logprobs,
        )
        if not self._body.echo:
            return tokens.describe(update.token_ids, update.logprobs)
        prompt = tokens.of_prompt(record.spec, record.prompt_logprobs)
        return joined(prompt, tokens.describe(update.token_ids, update.logprobs))
