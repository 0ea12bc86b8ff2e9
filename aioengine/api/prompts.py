"""A body's prompt and sampling fields -> what the front end sends to a replica."""

import logging
from collections.abc import Sequence

import msgspec
from aiohttp import web

from aioengine import limits
from aioengine.api.context import Api
from aioengine.api.errors import ApiError, invalid
from aioengine.api.schema import ChatBody, Message, SamplingBody, TokenizeBody
from aioengine.frontend.detokenizer import IncrementalDetokenizer
from aioengine.frontend.front_end import UnavailableError
from aioengine.frontend.records import ChoiceSpec, Generation
from aioengine.frontend.template import TemplateError
from aioengine.frontend.text import ServedModel
from aioengine.messages import ChoiceParams
from aioengine.model_config import DefaultSampling

log = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by them would overflow."""
MAX_LOGGED_FIELDS = 100


def log_unknown_fields(api: Api, names: list[str]) -> None:
    """One line for each field name that nobody knows."""
    for name in names:
        if name not in api.unknown_fields and len(api.unknown_fields) < MAX_LOGGED_FIELDS:
            api.unknown_fields.add(name)
            log.info("ignoring the unknown request field %r", name[:64])


async def encode_text(api: Api, model: ServedModel, text: str, add_special: bool) -> list[int]:
    """Off the loop. Raises ApiError 400 for a text that no context could hold."""
    _check_text(api, model, text, "prompt")
    return await api.text.run(model.tokenizer.encode, text, add_special_tokens=add_special)


async def encode_chat(
    api: Api, model: ServedModel, body: ChatBody | TokenizeBody, messages: Sequence[Message]
) -> list[int]:
    """Render the model's chat template and encode it. Raises ApiError 400 for template errors."""
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
        _check_text(api, model, text, "messages")
        return model.tokenizer.encode(text, add_special_tokens=False)

    try:
        return await api.text.run(render)
    except TemplateError as error:
        raise invalid(str(error), error.field) from None


def _check_text(api: Api, model: ServedModel, text: str, field: str) -> None:
    """Tokenizing takes time: a text that is too long at the most bytes a token has is refused."""
    max_model_len = api.front_end.max_model_len
    assert max_model_len is not None
    max_bytes = max_model_len * model.tokenizer.max_token_bytes
    if len(text) > max_bytes:
        raise invalid(
            f"{field} has {len(text)} characters, the context is {max_model_len} tokens",
            field,
            "context_length_exceeded",
        )


def choice_specs(
    api: Api,
    model: ServedModel,
    body: SamplingBody,
    prompts: Sequence[Sequence[int]],
    *,
    prompt_field: str,
    max_tokens: int | None,
    max_tokens_field: str = "max_tokens",
    default_max_tokens: int | None = None,
    logprobs: int | None,
) -> list[ChoiceSpec]:
    """n choices per prompt, prompt by prompt.

    `max_tokens` is what the client asked for; else `default_max_tokens`, as far as the context
    lasts (None: all of it). A refusal names the field that the prompt, or the number, came in.
    """
    body = _with_defaults(body, model.config.default_sampling)
    n = body.n or 1
    if n * len(prompts) > limits.MAX_CHOICES_PER_REQUEST:
        raise invalid(
            f"n × prompts is {n * len(prompts)}, the limit is {limits.MAX_CHOICES_PER_REQUEST}", "n"
        )
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs does not go with stream", "prompt_logprobs")
    stop = body.stop_strings()
    stop_token_ids = _stop_token_ids(model, body)
    logit_bias = body.biased_logits(model.config.vocab_size)
    seed = api.seeds.getrandbits(63) if body.seed is None else body.seed & limits.MAX_SEED
    specs = []
    for prompt_ids in prompts:
        room = _check_prompt(api, model, prompt_ids, prompt_field)
        shared_ids = tuple(prompt_ids)
        if max_tokens is not None and max_tokens > room:
            raise invalid(
                f"{max_tokens_field} {max_tokens} and a prompt of {len(prompt_ids)} tokens exceed "
                f"the context of {api.front_end.max_model_len} tokens",
                max_tokens_field,
                "context_length_exceeded",
            )
        first = _sampling_params(
            body,
            max_tokens=max_tokens or min(room, default_max_tokens or room),
            seed=seed,
            stop_token_ids=stop_token_ids,
            logprobs=logprobs,
            logit_bias=logit_bias,
        )
        for choice_index in range(n):
            params = first if choice_index == 0 else _of_choice(first, choice_index)
            specs.append(_choice_spec(model, body, shared_ids, params, stop))
    return specs


def _choice_spec(
    model: ServedModel,
    body: SamplingBody,
    prompt_ids: tuple[int, ...],
    params: ChoiceParams,
    stop: tuple[str, ...],
) -> ChoiceSpec:
    include_stop = bool(body.include_stop_str_in_output)
    return ChoiceSpec(
        prompt_ids=prompt_ids,
        params=params,
        detokenizer=IncrementalDetokenizer(
            model.tokenizer,
            stop=stop,
            include_stop=include_stop,
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=params.min_tokens,
        ),
        eos_token_ids=() if body.ignore_eos else model.eos_token_ids,
        include_stop=include_stop,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )


def _with_defaults(body: SamplingBody, defaults: DefaultSampling) -> SamplingBody:
    """The body, with the model's own choice for each sampling field that it leaves out."""
    chosen = {
        name: value
        for name, value in msgspec.structs.asdict(defaults).items()
        if value is not None and getattr(body, name) is None
    }
    return msgspec.structs.replace(body, **chosen)


def _check_prompt(
    api: Api, model: ServedModel, prompt_ids: Sequence[int], prompt_field: str
) -> int:
    """Tokens of the context that a prompt leaves."""
    max_model_len = api.front_end.max_model_len
    assert max_model_len is not None
    if not prompt_ids:
        raise invalid(f"{prompt_field} must not be empty", prompt_field)
    if len(prompt_ids) >= max_model_len:
        raise invalid(
            f"{prompt_field} has {len(prompt_ids)} tokens, the context is {max_model_len} tokens",
            prompt_field,
            "context_length_exceeded",
        )
    if max(prompt_ids) >= model.config.vocab_size:
        raise invalid(
            f"{prompt_field} has token id {max(prompt_ids)}, the vocabulary has "
            f"{model.config.vocab_size}",
            prompt_field,
        )
    return max_model_len - len(prompt_ids)


def _of_choice(first: ChoiceParams, choice_index: int) -> ChoiceParams:
    """For another choice of the same prompt, which shares the prompt's log probabilities."""
    return msgspec.structs.replace(first, choice_index=choice_index, prompt_logprobs=None)


def _sampling_params(
    body: SamplingBody,
    *,
    max_tokens: int,
    seed: int,
    stop_token_ids: tuple[int, ...],
    logprobs: int | None,
    logit_bias: tuple[tuple[int, float], ...],
) -> ChoiceParams:
    """Of the first choice of a prompt."""
    temperature = 1.0 if body.temperature is None else body.temperature
    repetition_penalty = 1.0 if body.repetition_penalty is None else body.repetition_penalty
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(
            f"min_tokens is {min_tokens}, but at most {max_tokens} tokens will be generated",
            "min_tokens",
        )
    return ChoiceParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        seed=seed,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=repetition_penalty,
        logit_bias=logit_bias,
    )


def _stop_token_ids(model: ServedModel, body: SamplingBody) -> tuple[int, ...]:
    """The client's, and the model's end-of-sequence tokens unless they are to be ignored."""
    stop_ids = list(body.stop_token_ids or [])
    if len(stop_ids) > limits.MAX_STOP_TOKEN_IDS:
        raise invalid(
            f"stop_token_ids has {len(stop_ids)} ids, the limit is {limits.MAX_STOP_TOKEN_IDS}",
            "stop_token_ids",
        )
    if any(token_id >= model.config.vocab_size for token_id in stop_ids):
        raise invalid(
            f"stop_token_ids has {max(stop_ids)}, the vocabulary has {model.config.vocab_size}",
            "stop_token_ids",
        )
    if not body.ignore_eos:
        stop_ids += model.eos_token_ids
    return tuple(dict.fromkeys(stop_ids))


def start_generation(api: Api, request: web.Request, specs: list[ChoiceSpec]) -> Generation:
    """Hand the choices to replicas. Raises ApiError 503 when no new work is taken."""
    pin = request.headers.get("X-data-parallel-rank")
    if pin is not None and not (pin.isdecimal() and len(pin) < 10):
        raise invalid(f"X-data-parallel-rank must be a number, got {pin[:32]!r}")
    try:
        return api.front_end.generate(specs, None if pin is None else int(pin))
    except UnavailableError as error:
        raise ApiError(503, str(error)) from None
    except ValueError as error:
        raise invalid(str(error)) from None
