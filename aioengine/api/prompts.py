"""A body's prompt and sampling fields -> what the front end sends to a replica."""

import logging
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from aioengine import limits
from aioengine.api.context import GENERATION, Api
from aioengine.api.errors import ApiError, invalid, unsupported
from aioengine.api.schema import ChatBody, Message, SamplingBody, TokenizeBody
from aioengine.frontend.choices import check_text, resolve_choices
from aioengine.frontend.front_end import UnavailableError
from aioengine.frontend.records import ChoiceSpec, Generation
from aioengine.frontend.template import TemplateError
from aioengine.frontend.text import ServedModel

log = logging.getLogger(__name__)


def log_unknown_fields(api: Api, names: list[str]) -> None:
    """One line for what a request brings that nobody knows, and that no request brought before."""
    room = limits.MAX_LOGGED_FIELDS - len(api.unknown_fields)
    shown = {name[: limits.MAX_LOGGED_NAME_CHARS] for name in names} - api.unknown_fields
    if shown and room:
        new = sorted(shown)[:room]
        api.unknown_fields.update(new)
        log.info("ignoring request fields that nobody knows: %s", ", ".join(map(repr, new)))


async def encode_text(api: Api, model: ServedModel, text: str, add_special: bool) -> list[int]:
    """Off the loop. Raises ApiError 400 for a text that no context could hold."""
    check_text(model, text, "prompt", context_of(api))
    return await api.text.run(model.tokenizer.encode, text, add_special_tokens=add_special)


async def encode_chat(
    api: Api, model: ServedModel, body: ChatBody | TokenizeBody, messages: Sequence[Message]
) -> list[int]:
    """Render the model's chat template and encode it. Raises ApiError 400 for template errors, and
    for a template that came with the request."""
    if body.chat_template is not None:
        raise unsupported("chat_template")
    rendered = [message.for_template() for message in messages]

    def render() -> list[int]:
        text = model.template.render(
            rendered,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            bos_token=model.tokenizer.bos_token,
            eos_token=model.tokenizer.eos_token,
            extra=body.chat_template_kwargs,
        )
        check_text(model, text, "messages", context_of(api))
        return model.tokenizer.encode(text, add_special_tokens=False)

    try:
        return await api.text.run(render)
    except TemplateError as error:
        raise invalid(str(error), error.field) from None


def choice_specs(
    api: Api, model: ServedModel, body: SamplingBody, prompts: Sequence[Sequence[int]], **asked: Any
) -> list[ChoiceSpec]:
    """n choices per prompt, prompt by prompt; `asked` as in `resolve_choices`."""
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs does not go with stream", "prompt_logprobs")
    return resolve_choices(
        model, body, prompts, max_model_len=context_of(api), seeds=api.seeds, **asked
    )


def context_of(api: Api) -> int:
    """Tokens of prompt and answer together."""
    max_model_len = api.front_end.max_model_len
    assert max_model_len is not None, "served before ready"
    return max_model_len


def start_generation(api: Api, request: web.Request, specs: list[ChoiceSpec]) -> Generation:
    """Hand the choices to replicas. Raises ApiError 503 when no new work is taken."""
    pin = request.headers.get("X-data-parallel-rank")
    if pin is not None and not (pin.isascii() and pin.isdecimal() and len(pin) < 10):
        raise invalid(f"X-data-parallel-rank must be a number, got {pin[:32]!r}")
    try:
        generation = api.front_end.generate(specs, None if pin is None else int(pin))
    except UnavailableError as error:
        raise ApiError(
            503, str(error), code=error.code, retry_after_s=error.retry_after_s
        ) from None
    except ValueError as error:
        raise invalid(str(error)) from None
    request[GENERATION] = generation
    return generation
